"""Optimizers and schedules as pure functions. May import `state` and what lies below it; what a step is made of comes above."""

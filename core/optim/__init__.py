"""Optimizers and schedules as pure functions. May import `state` and everything below it."""

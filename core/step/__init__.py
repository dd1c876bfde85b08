"""A training step as a function. May import `optim`, `metrics`, `state` and what lies below them, and `engine`, its own."""

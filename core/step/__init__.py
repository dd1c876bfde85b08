"""A training step as a function. May import `optim`, `metrics`, `state`, everything below them, and its own `engine`."""

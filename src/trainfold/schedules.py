"""Schedules: pure functions of the step.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.optim.schedule import Schedule, constant, cosine, horizon, linear, wsd

__all__ = ["Schedule", "constant", "cosine", "horizon", "linear", "wsd"]

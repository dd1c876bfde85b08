"""How many microbatches make a step, computed before a model exists.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.step.accumulation import accumulation_steps, check_plan, windows

__all__ = ["accumulation_steps", "check_plan", "windows"]

"""How many microbatches make a step, computed before a model exists.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.step.accumulation import accumulation_steps, check_plan, windows
from trainfold.core.step.batch_ramp import BatchRamp, batch_ramp

__all__ = ["BatchRamp", "accumulation_steps", "batch_ramp", "check_plan", "windows"]

"""Which checkpoints stay, and which one is the best.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.runs.best_file import load_best, save_best
from trainfold.core.best.record import BestRecord, decide_best, is_better, make_best_record
from trainfold.core.best.top_n import BestEntry, BestPlan, plan_best
from trainfold.core.save.retention import (
    Retention,
    keep_all,
    keep_best,
    keep_every,
    keep_last,
    keep_newer,
    plan_retention,
)

__all__ = [
    "BestEntry",
    "BestPlan",
    "BestRecord",
    "Retention",
    "decide_best",
    "is_better",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_last",
    "keep_newer",
    "load_best",
    "make_best_record",
    "plan_best",
    "plan_retention",
    "save_best",
]

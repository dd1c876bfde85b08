"""Rules for which checkpoints stay, and the record of the best one.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.ranks.decide_best import decide_best, decide_best_n
from trainfold.backends.runs.best.best_file import load_best, load_best_n, save_best
from trainfold.core.best.record import BestRecord, is_better, make_best_record, updated
from trainfold.core.best.top_n import BestEntry, BestPlan, plan_best, rewound
from trainfold.core.save.retention import (
    Retention,
    Saved,
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
    "Saved",
    "decide_best",
    "decide_best_n",
    "is_better",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_last",
    "keep_newer",
    "load_best",
    "load_best_n",
    "make_best_record",
    "plan_best",
    "plan_retention",
    "rewound",
    "save_best",
    "updated",
]

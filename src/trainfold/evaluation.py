"""Evaluation in parts: positions, tallies, their sums, and results.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.bridges.torchmetrics import TorchMetric
from trainfold.adapters.evaluation.time_limit import time_limit
from trainfold.core.data.eval_cursor import DistributedEvalCursor, eval_batches, make_eval_cursor
from trainfold.core.evaluate.evaluation import Evaluation, evaluation_of
from trainfold.core.evaluate.suite import Tally, merge_tallies, no_tally, observe, results_of

__all__ = [
    "DistributedEvalCursor",
    "Evaluation",
    "Tally",
    "TorchMetric",
    "eval_batches",
    "evaluation_of",
    "make_eval_cursor",
    "merge_tallies",
    "no_tally",
    "observe",
    "results_of",
    "time_limit",
]

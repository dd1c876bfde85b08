"""Metrics that no batch size, order or number of ranks can change: ``from trainfold import metrics as M``.

Each is a frozen value with ``zero``, ``observe``, ``merge`` and ``result``; write your own as a `Metric`. A `Suite` is a mapping from
names to metrics::

    Sum, Mean, Variance, Min, Max        of all elements
    Ratio, Perplexity                    of two sums, such as a loss and its tokens
    TopK, Confusion, F1                  of classes
    PositionAccuracy                     for each position of sequences of any length
    AcceptanceLength, AcceptanceRate     of speculative decoding
    Histogram, Quantiles                 over fixed bins

The names are re-exports, each documented where it lives.
"""

from trainfold.core.evaluate.suite import Suite
from trainfold.core.exact.sum import ExactSum, exact_add, exact_merge, exact_value, exact_zero, ratio_of, rounded
from trainfold.core.metrics.acceptance import AcceptanceRate
from trainfold.core.metrics.confusion import F1, Confusion
from trainfold.core.metrics.counts import add_counts, beside, merge_counts, no_counts
from trainfold.core.metrics.extremes import Max, Min
from trainfold.core.metrics.histogram import Histogram, Quantiles
from trainfold.core.metrics.metric import Metric
from trainfold.core.metrics.moments import Mean, Sum, Variance
from trainfold.core.metrics.positions import AcceptanceLength, PositionAccuracy
from trainfold.core.metrics.ratio import Perplexity, Ratio
from trainfold.core.metrics.topk import TopK

__all__ = [
    "F1",
    "AcceptanceLength",
    "AcceptanceRate",
    "Confusion",
    "ExactSum",
    "Histogram",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "Perplexity",
    "PositionAccuracy",
    "Quantiles",
    "Ratio",
    "Suite",
    "Sum",
    "TopK",
    "Variance",
    "add_counts",
    "beside",
    "exact_add",
    "exact_merge",
    "exact_value",
    "exact_zero",
    "merge_counts",
    "no_counts",
    "ratio_of",
    "rounded",
]

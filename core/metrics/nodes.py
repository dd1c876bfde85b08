"""`ACCUMULATORS`: the node classes that metrics keep what they have seen in; a checkpoint may name each of them."""

from trainfold.core.exact.sum import ExactSum
from trainfold.core.metrics.acceptance import Reached
from trainfold.core.metrics.confusion import Pairs
from trainfold.core.metrics.extremes import Extreme
from trainfold.core.metrics.histogram import Bins
from trainfold.core.metrics.positions import Positions
from trainfold.core.metrics.ratio import Quotient
from trainfold.core.metrics.topk import Hits
from trainfold.core.metrics.total import Total
from trainfold.core.metrics.variance import Moments

ACCUMULATORS = (ExactSum, Total, Quotient, Moments, Extreme, Positions, Reached, Hits, Pairs, Bins)

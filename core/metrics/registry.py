"""`ACCUMULATORS`: the node classes of the metrics' accumulators; a checkpoint may name any of them."""

from trainfold.core.exact.sum import ExactSum
from trainfold.core.metrics.acceptance import Reached
from trainfold.core.metrics.confusion import Pairs
from trainfold.core.metrics.extremes import Extreme
from trainfold.core.metrics.histogram import Bins
from trainfold.core.metrics.moments import Moments, Total
from trainfold.core.metrics.positions import Positions
from trainfold.core.metrics.ratio import Quotient
from trainfold.core.metrics.topk import Hits

ACCUMULATORS = (ExactSum, Total, Quotient, Moments, Extreme, Positions, Reached, Hits, Pairs, Bins)

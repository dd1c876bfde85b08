"""The position of a run in its data: cursors, orders and shares, all in samples, and a sampler that reads by them.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.core.data.cursor import DataCursor, make_cursor
from trainfold.core.data.permutation import Permutation, sample_order
from trainfold.core.data.shares import even_split, shard_of

__all__ = ["DataCursor", "GlobalBatchSampler", "Permutation", "even_split", "make_cursor", "sample_order", "shard_of"]

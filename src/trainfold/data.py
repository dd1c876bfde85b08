"""The position of a run in its data: cursors, orders and shares, all in samples.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.data.cursor import DataCursor, make_cursor
from trainfold.core.data.permutation import Permutation, sample_order
from trainfold.core.data.shares import even_split, shard_of

__all__ = ["DataCursor", "Permutation", "even_split", "make_cursor", "sample_order", "shard_of"]

"""Random numbers that are a function of an explicit key, and the random streams of ranks.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.streams.rng_streams import restore_streams
from trainfold.backends.derived_streams import derive_streams
from trainfold.core.rng import Key, fold_in, forked_rng, make_key, seed_of

__all__ = ["Key", "derive_streams", "fold_in", "forked_rng", "make_key", "restore_streams", "seed_of"]

"""Randomness as an argument.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.rng import Key, fold_in, forked_rng, make_key, seed_of

__all__ = ["Key", "fold_in", "forked_rng", "make_key", "seed_of"]

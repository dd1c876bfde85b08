"""Models that are built on the meta device: memory for each rank's part, and values for exactly what no checkpoint has set.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.construct.initialize import initialize
from trainfold.adapters.construct.materialize import materialize
from trainfold.adapters.construct.on_meta import on_meta

__all__ = ["initialize", "materialize", "on_meta"]

"""Many workers, little network (DiLoCo): workers train apart, and exchange their weights with a server now and then.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.parallel.diloco_worker import DilocoWorker
from trainfold.backends.diloco.outer_server import DilocoServer
from trainfold.core.diloco.fragments import Fragments, fragments_of
from trainfold.core.diloco.outer_step import Contribution, outer_state, outer_step, trained_elements
from trainfold.core.diloco.work_units import WorkUnit

__all__ = [
    "Contribution",
    "DilocoServer",
    "DilocoWorker",
    "Fragments",
    "WorkUnit",
    "fragments_of",
    "outer_state",
    "outer_step",
    "trained_elements",
]

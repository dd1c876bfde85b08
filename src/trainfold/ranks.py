"""The ranks of a run, and the collective calls between them.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.parallel.microbatches import CheckedStep
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.backends.ranks.in_process import SingleProcess, run_threads
from trainfold.backends.ranks.torch_distributed import TorchCollectives
from trainfold.core.layout.agreement.rank_tree import RankTree, rank_tree
from trainfold.core.layout.data_parallel import Replicas
from trainfold.core.layout.parallelism import Coordinates, Parallelism
from trainfold.core.layout.world import Collectives, PendingRows, World, make_world
from trainfold.core.step.rows.sharded import Sharded

__all__ = [
    "CheckedStep",
    "Collectives",
    "Coordinates",
    "Parallelism",
    "PendingRows",
    "RankTree",
    "Replicas",
    "Sharded",
    "SingleProcess",
    "TorchCollectives",
    "TorchParallelism",
    "World",
    "make_world",
    "rank_tree",
    "run_threads",
]

"""Weights from outside the checkpoints of a run: from another run, a model hub, a server, rank 0, or the script itself. Pass one to ``attach(weights=...)``.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.formats.detect import detect_format
from trainfold.backends.weights.checkpoint import CheckpointWeights
from trainfold.backends.weights.dcp_directory import DcpDirectory
from trainfold.backends.weights.dcp_export import write_dcp_directory
from trainfold.backends.weights.first_rank import FirstRank
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_writer import plan_hub_directory, write_hub_directory
from trainfold.backends.weights.served import ServedWeights
from trainfold.backends.weights.server import WeightServer
from trainfold.backends.weights.take import take_weights
from trainfold.backends.weights.torch_file import TorchFile
from trainfold.backends.weights.transformed import Transformed
from trainfold.core.weights.detected import Detected
from trainfold.core.weights.hub.hub_plan import HubPlan
from trainfold.core.weights.source import ListedSource, Wanted, WeightSource
from trainfold.core.weights.wrapped import ByScript, Cast, Frozen, Renamed

__all__ = [
    "ByScript",
    "Cast",
    "CheckpointWeights",
    "DcpDirectory",
    "Detected",
    "FirstRank",
    "Frozen",
    "HubDirectory",
    "HubPlan",
    "ListedSource",
    "Renamed",
    "ServedWeights",
    "TorchFile",
    "Transformed",
    "Wanted",
    "WeightServer",
    "WeightSource",
    "detect_format",
    "plan_hub_directory",
    "take_weights",
    "write_dcp_directory",
    "write_hub_directory",
]

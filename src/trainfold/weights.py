"""Weights from outside the checkpoints of a run: from another run, a model hub, a server, rank 0, or the script itself. Pass one to ``attach(weights=...)``.

The names are re-exports, each documented where it lives.
"""

from trainfold.backends.formats.detect import detect_format
from trainfold.backends.weights.checkpoint import CheckpointWeights
from trainfold.backends.weights.first_rank import FirstRank
from trainfold.backends.weights.foreign.dcp_directory import DcpDirectory
from trainfold.backends.weights.foreign.dcp_export import write_dcp_directory
from trainfold.backends.weights.foreign.take_training import take_training
from trainfold.backends.weights.foreign.torch_file import TorchFile
from trainfold.backends.weights.foreign.training import (
    SavedGroup,
    Training,
    accelerate_training,
    dcp_training,
    lightning_training,
    torch_training,
)
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_files import HubFiles
from trainfold.backends.weights.hub_writer import plan_hub_directory, write_adapter_directory, write_hub_directory
from trainfold.backends.weights.served import ServedWeights
from trainfold.backends.weights.server import WeightServer
from trainfold.backends.weights.take import plan_weights, take_weights
from trainfold.backends.weights.transformed import Transformed
from trainfold.core.weights.detected import Detected
from trainfold.core.weights.hub.hub_plan import HubPlan
from trainfold.core.weights.several.cover import Coverage, SourceUse
from trainfold.core.weights.several.load_spec import LoadSpec
from trainfold.core.weights.several.several_sources import SeveralSources
from trainfold.core.weights.source import ListedSource, Wanted, WeightSource
from trainfold.core.weights.wrapped import ByScript, Cast, Frozen, Renamed

__all__ = [
    "ByScript",
    "Cast",
    "CheckpointWeights",
    "Coverage",
    "DcpDirectory",
    "Detected",
    "FirstRank",
    "Frozen",
    "HubDirectory",
    "HubFiles",
    "HubPlan",
    "ListedSource",
    "LoadSpec",
    "Renamed",
    "SavedGroup",
    "ServedWeights",
    "SeveralSources",
    "SourceUse",
    "TorchFile",
    "Training",
    "Transformed",
    "Wanted",
    "WeightServer",
    "WeightSource",
    "accelerate_training",
    "dcp_training",
    "detect_format",
    "lightning_training",
    "plan_hub_directory",
    "plan_weights",
    "take_training",
    "take_weights",
    "torch_training",
    "write_adapter_directory",
    "write_dcp_directory",
    "write_hub_directory",
]

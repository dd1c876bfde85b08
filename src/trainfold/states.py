"""The parts of a state, and what a tree of leaves looks like without its values.

The names are re-exports, each documented where it lives.
"""

from trainfold.core.component_names import validate_components
from trainfold.core.format.fingerprint import content_fingerprint
from trainfold.core.layout.leaf_spec import Difference, LeafSpec, ScalarSpec
from trainfold.core.layout.stage import Stage, make_stage
from trainfold.core.state.masters import refresh_masters
from trainfold.core.state.spec import spec_of
from trainfold.core.state.state import (
    ModelState,
    OfRankZero,
    Opaque,
    OptimizerState,
    ParamGroup,
    PerRank,
    TrainableState,
    make_progress,
)
from trainfold.core.step.optimizer import Optimizer

__all__ = [
    "Difference",
    "LeafSpec",
    "ModelState",
    "OfRankZero",
    "Opaque",
    "Optimizer",
    "OptimizerState",
    "ParamGroup",
    "PerRank",
    "ScalarSpec",
    "Stage",
    "TrainableState",
    "content_fingerprint",
    "make_progress",
    "make_stage",
    "refresh_masters",
    "spec_of",
    "validate_components",
]

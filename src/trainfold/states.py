"""The parts of a state, the files that belong to it, and what a tree of leaves looks like without its values.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.flight.check_live_steps import check_live_steps
from trainfold.adapters.flight.check_steps import check_steps
from trainfold.adapters.flight.flight_log import FlightLog, Replayed
from trainfold.backends.flight.flights import read_flights
from trainfold.backends.side.checkpoint_files import read_side_files, write_side_files
from trainfold.backends.side.side_files import SideFiles
from trainfold.core.component_names import validate_components
from trainfold.core.flight.flight import Flight
from trainfold.core.flight.step_difference import StepDifference, first_step_apart
from trainfold.core.flight.step_record import StepRecord
from trainfold.core.format.fingerprint import content_fingerprint
from trainfold.core.layout.leaf_spec import Difference, LeafSpec, ScalarSpec
from trainfold.core.layout.stage import Stage, make_stage
from trainfold.core.side.side_file import SideFile
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
    "Flight",
    "FlightLog",
    "LeafSpec",
    "ModelState",
    "OfRankZero",
    "Opaque",
    "Optimizer",
    "OptimizerState",
    "ParamGroup",
    "PerRank",
    "Replayed",
    "ScalarSpec",
    "SideFile",
    "SideFiles",
    "Stage",
    "StepDifference",
    "StepRecord",
    "TrainableState",
    "check_live_steps",
    "check_steps",
    "content_fingerprint",
    "first_step_apart",
    "make_progress",
    "make_stage",
    "read_flights",
    "read_side_files",
    "refresh_masters",
    "spec_of",
    "validate_components",
    "write_side_files",
]

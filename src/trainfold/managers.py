"""The protocol of a checkpoint manager, its results, and managers built from a config.

The names are re-exports, each documented where it lives.
"""

from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.protocol import CheckpointManagerLike, LoadDecision, Restored, SaveOutcome
from trainfold.adapters.requests.sources import Asked, Combined, RequestSource
from trainfold.core.save.cadence import advise_cadence
from trainfold.core.save.events import Event
from trainfold.core.save.triggers import Verdict

__all__ = [
    "Asked",
    "CheckpointConfig",
    "CheckpointManagerLike",
    "Combined",
    "Event",
    "LoadDecision",
    "RequestSource",
    "Restored",
    "SaveOutcome",
    "Verdict",
    "advise_cadence",
    "create_checkpoint_manager",
]

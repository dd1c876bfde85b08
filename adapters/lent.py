"""`Lent`: a live run as a value for a save, which reads it at once; so nothing is made that only a keeper would need."""

from collections.abc import Mapping
from typing import final

import attrs

from trainfold.core.names import NamedTensors
from trainfold.core.state import TrainState


@final
@attrs.frozen(eq=False)
class Lent:
    """A live run at a boundary.

    Attributes:
        state: as `Live.capture` returns it, with the parameters themselves.
        modules: what the attached modules hold, by component.
    """

    state: TrainState
    modules: Mapping[str, NamedTensors]

"""`LiveView`: a live run as a value for a save, which reads it at once; so nothing is made that only a keeper would need."""

from collections.abc import Callable, Mapping
from typing import Any, final

import attrs

from trainfold.core.state.fqn import NamedTensors
from trainfold.core.state.state import TrainState


@final
@attrs.frozen(eq=False)
class LiveView:
    """A live run at a boundary.

    Attributes:
        state: what the loop has a hand on: as `Live.capture` returns it, with the parameters themselves and without random streams.
        modules: what the attached modules hold, by component.
        rng: makes the component of the random streams, which were read already; in any thread. None where the state has it.
    """

    state: TrainState
    modules: Mapping[str, NamedTensors] = attrs.field(factory=dict)
    rng: Callable[[], Any] | None = None

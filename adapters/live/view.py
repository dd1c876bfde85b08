"""`LiveView`: a no-copy view of a live run, valid only during a save call."""

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
        state: the run as `Live.capture` returns it, with the parameter objects themselves and without the random streams.
        modules: the tensors of the attached modules, by component.
        rng: makes the component of the random streams, which were read already; may be called in any thread. None where
            the state has the streams.
    """

    state: TrainState
    modules: Mapping[str, NamedTensors] = attrs.field(factory=dict)
    rng: Callable[[], Any] | None = None

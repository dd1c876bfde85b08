"""`LiveView`: a no-copy view of a live run, valid only during a save call."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import attrs

from trainfold.adapters.components.component import ComponentAdapter, ObjectPart, TreePart
from trainfold.adapters.components.module import module_state
from trainfold.adapters.components.own_modules import OwnModulePart
from trainfold.adapters.live.attached_objects import AttachedObjects
from trainfold.adapters.live.optional import captured
from trainfold.adapters.parallel.sharing import SharedPart
from trainfold.adapters.streams.rng_streams import RngPart
from trainfold.core.state.fqn import NamedTensors
from trainfold.core.state.state import TrainState


@final
@attrs.frozen(eq=False)
class LiveView:
    """A live run at a boundary.

    Attributes:
        state: the run as `Live.capture` returns it, with the parameter objects themselves and without the random streams.
        modules: the tensors of the attached modules, by component.
        rng: makes the component of the random streams, which were read already; may be called in any thread. None if
            the state has the streams.
        left_out: optional components that cannot be saved, each with the reason.
    """

    state: TrainState
    modules: Mapping[str, NamedTensors] = attrs.field(factory=dict)
    rng: Callable[[], Any] | None = None
    left_out: Mapping[str, str] = attrs.field(factory=dict)


def read_objects(
    objects: AttachedObjects,
    parts_of: Callable[[Mapping[str, NamedTensors]], dict[str, ComponentAdapter]],
    optional: Collection[str],
    *,
    view: bool,
) -> tuple[dict[str, Any], dict[str, NamedTensors], Callable[[], Any], dict[str, str]]:
    """Read every component once.

    Args:
        objects: of the run.
        parts_of: returns the components, from the tensors of the modules.
        optional: components left out if they cannot be saved.
        view: whether modules are read without making values of their parameters.

    Returns:
        The values without the random streams, the tensors of the modules, what makes the value of the streams, and why optional components
        are left out.
    """
    named = objects.named()
    parts = parts_of(named)
    rng = parts.pop("rng")
    assert isinstance(rng, RngPart)
    late = named.keys() - set(optional)  # read after the user's code
    found, left_out = captured({name: part for name, part in parts.items() if name not in late}, optional)
    streams = rng.read()  # last, because the user's objects may draw to return their state
    if any(isinstance(part, ObjectPart | TreePart | OwnModulePart | SharedPart) for part in parts.values()):
        named = objects.named()  # the user's code has run, and may have put other tensors into the modules
    values = {
        name: module_state(named[name], name, view=view) if name in named else found[name]
        for name in parts
        if name in late or name in found
    }
    return values, named, streams, left_out

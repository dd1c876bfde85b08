"""`SinceRestore`: finds what changed between a restore and the first batch, and puts back what has to be."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, final

import torch

from trainfold.adapters.batches.batch_digest import batch_digest
from trainfold.adapters.components.component import ComponentAdapter, copied_containers
from trainfold.adapters.components.optimizer import OptimizerPart
from trainfold.adapters.components.optimizer_state import groups_of
from trainfold.adapters.components.scheduler import SchedulerPart
from trainfold.adapters.live.restore import refusals, write_all
from trainfold.adapters.own_state.read_back import Difference, first_unequal
from trainfold.adapters.streams.rng_streams import RngPart, preserved_rng
from trainfold.backends.derived_streams import NO_STREAMS
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core import tree
from trainfold.core.errors import RestoreRefused
from trainfold.core.format.codec import DENSE
from trainfold.core.state.state import Opaque

_LOG = logging.getLogger("trainfold")
_NOT_THE_BODYS: Final = ("dataset", "trainer")  # positions and counters, which only the run itself moves
_MOVE_IT: Final = "Move what drew there (a dataset, a model, an evaluation) before the restore"
PUT_BACK: Final = (
    "the random streams of %s have moved between the restore and the first batch: put back, so that the run continues as it "
    f"would have. {_MOVE_IT}; to draw other numbers on purpose, seed after the first batch, or restore without rng"
)
PUT_BACK_UNSURE: Final = (
    "the random streams of %s have moved between the restore and the first batch: put back as they were saved. "
    f"{_MOVE_IT}. But a loop that seeds or draws at the start of each epoch needs them as they were before they were put back, and "
    "the two cannot be distinguished here: write `for epoch in live.epochs(n): ...`, where they can"
)
LEFT: Final = (
    "the random streams of %s have moved between the restore and the first batch, and are left so, because they moved before the "
    "first batch of an earlier epoch of this run too, as in a loop that seeds or draws at the start of each epoch. If this start of "
    "the program drew anything else there (a dataset, a model, an evaluation), the run continues with other numbers, and the two "
    "cannot be distinguished here: write `for epoch in live.epochs(n): ...`, where they can"
)


@final
class SinceRestore:
    """A run as a restore left it, until the first batch.

    Args:
        parts: returns the components of the run as they are now; None once the run is gone.
        chosen: the restored components; None for all.
    """

    def __init__(
        self, parts: Callable[[], Mapping[str, ComponentAdapter] | None], chosen: Collection[str] | None
    ) -> None:
        self._parts = parts
        self._chosen = None if chosen is None else frozenset(chosen)
        now = parts()
        self._streams = streams_of(now) if now is not None and self._is_chosen("rng") else None
        self._start: dict[str, Any] = {}

    def settle_streams(self, message: str) -> None:
        """Log which random streams have moved, and put them back unless the message is `LEFT`."""
        parts = self._parts()
        if parts is None or self._streams is None:
            return
        names = moved(self._streams, streams_of(parts))
        if names:
            if message is not LEFT:
                parts["rng"].write(self._streams)
            log_for_all(message, ", ".join(names))

    # --- a body that runs again from the middle of its epoch ------------------------------------------------------------

    def begin_body(self) -> None:
        """Copy the run before the start of a body changes it; tensors of a device are copied to the host."""
        parts = self._parts()
        if parts is None:
            return
        with preserved_rng(_rng(parts).device):  # the user's objects may draw to return their state
            self._start = {
                name: _kept(part.capture())
                for name, part in parts.items()
                if self._is_chosen(name) and name not in (*_NOT_THE_BODYS, "rng")
            }
        if self._is_chosen("rng"):
            self._start["rng"] = streams_of(parts)

    def end_start(self, epoch: int) -> None:
        """Put back what the start of the body has changed: it ran before the save, and has now run again.

        Raises:
            RestoreRefused: if it cannot be put back, for example because a param group was added; nothing is put back then.
        """
        start, self._start = self._start, {}
        parts = self._parts()
        if parts is None or not start:
            return
        device = _rng(parts).device
        streams = streams_of(parts)
        with preserved_rng(device):
            found = {name: _difference(name, before, parts[name]) for name, before in start.items() if name != "rng"}
        changed = {name: _text_of(each) for name, each in found.items() if each is not None}
        names = moved(start["rng"], streams) if "rng" in start else []
        if names:
            changed["rng"] = f"the random streams of {', '.join(names)}"
        if changed:
            kept = {name: start[name] for name in changed}
            reasons = refusals({name: parts[name] for name in changed}, kept, None)
            if reasons:
                raise RestoreRefused("live.epochs", reasons)
            write_all({name: part for name, part in parts.items() if name in changed}, kept)
            log_for_all(
                "the run was saved in the middle of epoch %d, after the start of its body in live.epochs() had run. The resume has run "
                "that start again, and what it changed is put back as it was saved: %s. Change on purpose before live.epochs(), "
                "or after the first batch",
                epoch,
                "; ".join(changed.values()),
            )
        for name, before in start.items():
            part = parts[name]
            if isinstance(part, OptimizerPart):
                part.write_gradients(before)

    def _is_chosen(self, name: str) -> bool:
        return self._chosen is None or name in self._chosen


def streams_of(parts: Mapping[str, ComponentAdapter]) -> Opaque:
    """The global random streams now."""
    return _rng(parts).capture()


def small_state(parts: Mapping[str, ComponentAdapter]) -> str:
    """A digest of the random streams, the schedulers and the hyperparameters."""
    found: dict[str, Any] = {"rng": streams_of(parts).value}
    for name, part in parts.items():
        if isinstance(part, SchedulerPart):
            found[name] = part.capture()
        elif isinstance(part, OptimizerPart):
            found[name] = [dict(group.hyper) for group in groups_of(part.optimizer, part.names)]
    return batch_digest(found)


def moved(before: Opaque, now: Opaque) -> list[str]:
    """The names of the random streams that have moved."""
    return [
        name
        for name, value in before.value.items()
        if name not in NO_STREAMS and batch_digest(value) != batch_digest(now.value.get(name))
    ]


def _rng(parts: Mapping[str, ComponentAdapter]) -> RngPart:
    rng = parts["rng"]
    assert isinstance(rng, RngPart)
    return rng


def _kept(value: Any) -> Any:
    return copied_containers(tree.map_tensors(_on_host, value))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in DENSE and tensor.device.type not in ("cpu", "meta"):
        return tensor.detach().to("cpu")
    return tensor.detach().clone()


def _difference(name: str, before: Any, part: ComponentAdapter) -> Difference | None:
    now = part.capture()
    found = first_unequal(before, now, name)
    if found is None or first_unequal(part.capture(), now, name) is not None:
        return None  # a state that differs at each capture, such as a clock, cannot be compared
    return found


def _text_of(difference: Difference) -> str:
    where, was, now = difference
    return f"{where}: {now}, was {was}"

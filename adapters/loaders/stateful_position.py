"""`StatefulPosition`: tracks where a loop is in a loader with its own state, and checks that a saved position fits the loader."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

from torch.utils.data import DataLoader

from trainfold.adapters.batches.draws import Draws
from trainfold.adapters.batches.feed import (
    OTHER,
    Deliveries,
    Delivery,
    generator_problems,
    generators_of,
    length_of,
    mismatch,
    position_problems,
    samplers_of,
    set_generators,
)
from trainfold.adapters.batches.hand_out import HandedOut
from trainfold.adapters.batches.loader_extras import LoaderExtras
from trainfold.adapters.batches.pull_watch import late_order_problems
from trainfold.adapters.batches.sampler_tap import order_problems
from trainfold.adapters.components.component import ComponentAdapter, copied, copied_containers, kind_of
from trainfold.adapters.loaders.iterable import Replay, torchdatas
from trainfold.adapters.loaders.states_before import StatesBefore, steps_since_snapshot
from trainfold.core.errors import TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque


@final
class StatefulPosition:
    """Counts of what the loop consumed, and the state of the loader.

    Args:
        loader: an iterable with ``state_dict`` and ``load_state_dict``.
        workers: how many workers report their batches.
    """

    def __init__(self, loader: Any, workers: int) -> None:
        self.loader = loader
        self.generators = generators_of(loader)
        self.extras = LoaderExtras(loader)
        self.policy: Mapping[str, DriftAction] = {}
        self.draws = Draws(workers, persistent=bool(workers and loader.persistent_workers))
        self.deliveries = Deliveries()
        self.states_before = StatesBefore(loader, workers)
        self.epoch = self.batches = 0  # that were consumed
        self.drawing, self.drawn = 0, 0  # epoch and batches that were drawn
        self.iterator: Iterator[Any] | None = None
        self.order: Opaque | None = None  # what the epoch's order was drawn from
        self.loaded: Any = None  # a state that was loaded into the loader and not iterated yet
        self.replay: Replay | None = None  # draws batches that a resume may have to draw again
        self.digest: str | None = None  # of the epoch's batches that were consumed; None if the loader's state suffices
        self.samplers: dict[str, Any] = {}  # states between two epochs
        self.began: Any = None  # the loader's state at the start of the epoch, if it has one
        self.again: deque[Opaque] = deque()  # for batches to be delivered again: everything that they were drawn from
        self.again_ends = False  # whether the last of them is the last of its epoch

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed, and the epoch is not over."""
        return self.batches > 0

    @property
    def last_read(self) -> str | None:
        """The digest of the last batch consumed here; None if there is none."""
        return self.draws.read

    def take_logged(self) -> list[str]:
        """Digests of the batches consumed since the last call, for a flight log; see `Draws.take_logged`."""
        return self.draws.take_logged()

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Keep track of the components under ``extra`` that batches may be drawn from."""
        self.extras.attend(extra)

    def count(self, taken: list[Delivery]) -> None:
        """Count batches as consumed."""
        for delivery in taken:
            handed: HandedOut = delivery.drawn
            self.batches += 1
            self.states_before.known.append(handed.before)
            if handed.drawn is not None:
                self.draws.consume(handed.drawn, delivery.samples or 0)
            if delivery.last:
                self.leave_out(delivery.left)
                self.end_epoch()
        if not self.deliveries.waiting:
            self.digest = self.digest_now()

    def leave_out(self, left: Iterable[Delivery]) -> None:
        """Leave out the rest of an epoch: persistent workers have drawn it, and continue after it."""
        for each in left:
            if each.drawn.drawn is not None:
                self.draws.absorb(each.drawn.drawn)

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.batches = self.epoch + 1, 0
        self.states_before.known.clear()
        self.draws.end_epoch()

    def digest_now(self) -> str | None:
        """Digest of all batches drawn in this epoch."""
        if self.replay is None:
            return self.digest
        return self.replay.digest if self.drawn else ""

    # --- as a value ---------------------------------------------------------------------------------------------------

    def capture(self, late: list[str]) -> Opaque:
        """The position as a value.

        Args:
            late: the streams that a sampler drew from in the middle of an epoch.
        """
        waiting = [each.drawn.mark for each in self.deliveries.waiting]
        marks = [each for each in waiting if each is not None]
        again = [each.streams for each in marks] if len(marks) == len(waiting) else []
        place = marks[0].place if again else self.place()
        digest, inside, back = place["digest"], self.batches > 0, self.states_before.back(len(self.draws.lasts))
        return Opaque(
            {
                "kind": "stateful",
                "version": 2,  # 1 has no draws
                "loader": kind_of(self.loader),
                "length": length_of(getattr(self.loader, "dataset", None)),
                "epoch": self.epoch,
                "batches": self.batches,
                **place,
                "began": place["began"] if inside and digest is not None else None,
                "order": place["order"] if inside else None,
                "draws": self.draws.capture(None),
                "before": self.states_before.known[-back] if inside and back else None,
                "back": back,
                "again": [each.value for each in (again or self.again)],
                "again_ends": self.deliveries.waiting[-1].last if again else self.again_ends,
                "late": late if inside else [],
                "generators": {name: generator.get_state() for name, generator in self.generators.items()},
            }
        )

    def place(self) -> dict[str, Any]:
        """The loader's position; every batch that was drawn counts."""
        return {
            "state": self.state(),
            "samplers": self.sampler_states(),
            "digest": self.digest_now(),
            "began": self.began,
            "order": None if self.order is None else self.order.value,
        }

    def state(self) -> Any:
        """The loader's state; None if the position needs no state, or no batch was drawn."""
        if self.loaded is not None or (self.digest_now() is not None and self.began is None):
            return self.loaded
        untouched = self.iterator is None and self.drawing == 0
        if untouched and isinstance(self.loader, DataLoader):
            return None  # asking would start its workers and draw from the global stream
        return copied_containers(self.loader.state_dict())

    def sampler_states(self) -> dict[str, Any]:
        """States of the samplers between two epochs: those in the loader's state are older, from its last batch."""
        if self.loaded is not None:
            return self.samplers
        between = self.iterator is None and self.drawing > 0 and torchdatas(self.loader)
        states = {name: sampler.state_dict() for name, sampler in samplers_of(self.loader).items() if between}
        return {name: copied_containers(state) for name, state in states.items()}

    def take(self, value: dict[str, Any]) -> None:
        """Load the loader's state, and move to a captured position; check it with `problems` first."""
        state = value["state"]
        self.give(state)
        self.epoch, self.batches = value["epoch"], value["batches"]
        self.drawing, self.drawn = self.epoch, self.batches
        self.iterator, self.loaded = None, state
        self.replay, self.digest, self.began = None, value.get("digest"), value.get("began")
        self.draws.take(value.get("draws"))
        back = min(value.get("back", 1), len(self.draws.lasts))
        while len(self.draws.lasts) > max(1, back):
            self.draws.lasts.popleft()
        self.states_before.take(value.get("before"), back)
        self.again = deque(Opaque(order) for order in value.get("again", []))
        self.again_ends = value.get("again_ends") is True
        self.samplers = value.get("samplers", {})
        self.order = None if value["order"] is None else Opaque(value["order"])
        self.deliveries.waiting.clear()
        set_generators(self.generators, value["generators"])

    def give(self, state: Any) -> None:
        """Load a state into the loader; None resets it."""
        self.loader.load_state_dict({} if state is None else copied(state))
        if state is None and hasattr(self.loader, "next_iter_state"):
            self.loader.next_iter_state = None  # torchdata 0.11: {} keeps the state that was loaded before

    # --- checks -------------------------------------------------------------------------------------------------------

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a saved position does not fit this loader."""
        found = position_problems(saved, "stateful", ("epoch", "batches"), versions=(1, 2))
        if found:
            return found
        value = saved.value
        if value.get("loader") != kind_of(self.loader):
            found.append(mismatch("state.dataset.loader", kind_of(self.loader), value.get("loader"), OTHER))
        length = length_of(getattr(self.loader, "dataset", None))
        if value.get("length", length) != length:  # absent from an older position; the contract of rank 0 has it
            found.append(
                mismatch(
                    "state.dataset.length",
                    f"a position in the {length} samples of this dataset",
                    f"one in {value['length']}",
                    "pass the dataset that the run was started with",
                )
            )
        digest, moved = value.get("digest"), value["epoch"] or value["batches"]
        if "state" not in value or (value["state"] is None and moved and digest is None):
            found.append(mismatch("state.dataset.state", "the loader's own state", "nothing", OTHER))
        if set(value.get("samplers", {})) - set(samplers_of(self.loader)):
            found.append(mismatch("state.dataset.samplers", "samplers with a state", "others", OTHER))
        if digest is not None and type(digest) is not str:
            found.append(mismatch("state.dataset.digest", "a digest of the batches, as text", repr(digest), OTHER))
        if value.get("order") is not None or (digest is not None and value["batches"]):
            found.extend(order_problems(value.get("order"), self.generators, self.extras))
        found.extend(self._ahead_problems(value))
        found.extend(self._draws_problems(value))
        found.extend(generator_problems(self.generators, value.get("generators"), "state.dataset.generators"))
        return found

    def _ahead_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        """Every reason why the records of the last batches, and of batches drawn ahead, cannot be used."""
        found = late_order_problems(value.get("late")) if value["batches"] else []
        before, again = value.get("before"), value.get("again", [])
        if before is not None and not (isinstance(before, dict) and {"state", "samplers", "first"} <= set(before)):
            found.append(
                mismatch("state.dataset.before", "the loader's state before a batch", repr(before)[:80], OTHER)
            )
        if type(value.get("back", 1)) is not int or not 0 <= value.get("back", 1) <= max(1, self.draws.workers):
            found.append(mismatch("state.dataset.back", "a number of batches", repr(value["back"])[:80], OTHER))
        if not isinstance(again, list):
            return [*found, mismatch("state.dataset.again", "a list", repr(again)[:80], OTHER)]
        for number, order in enumerate(again):
            found.extend(order_problems(order, self.generators, self.extras, where=f"state.dataset.again[{number}]"))
        return found

    def _draws_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        saved = value.get("draws")
        moved = isinstance(saved, dict) and saved.get("moved") is True
        behind = steps_since_snapshot(value.get("state"))
        if moved and behind and value.get("digest") is None:
            return [
                mismatch(
                    "state.dataset.state",
                    "a loader's state from after its last batch, because its workers' random streams have moved",
                    f"one from {behind} batches before",
                    "make the loader with snapshot_every_n_steps=1, and resume from the end of an epoch",
                )
            ]
        return self.draws.problems(saved, {}, self.policy, inside=bool(value["batches"]), tied=True, extras=self.extras)

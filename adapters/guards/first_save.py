"""`FirstSave`: refuses to save into a run whose checkpoints the state does not come from, unless that is meant (W10)."""

import weakref
from collections.abc import Sequence
from typing import final

import attrs

from trainfold.adapters.live.live import Live
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.runs.scan import read_inventory, read_manifest
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import RunNotRestored
from trainfold.core.layout.world import Collectives
from trainfold.core.state.descent import BEGINNING, Descent
from trainfold.core.state.state import TrainState


@final
@attrs.frozen
class HeldRun:
    """What a run holds: its id, and the checkpoints with a manifest, whole or not."""

    run_id: str
    checkpoints: tuple[str, ...]


def look(store: Store) -> HeldRun:
    """What a run holds now.

    Examples:
        >>> from trainfold.backends.stores.memory import MemoryStore
        >>> look(MemoryStore())
        HeldRun(run_id='', checkpoints=())
    """
    inventory = read_inventory(store)
    return HeldRun(inventory.run_id or "", tuple(entry.name for entry in inventory.entries if entry.head is not None))


@final
class FirstSave:
    """What a manager checks before its first save: a second start that forgets to restore leaves the first one behind.

    Args:
        store: the run.
        world: the ranks, each of which makes the same calls.
        held: what the run held when its lock was taken, since when nobody else adds to it.
        start_over: whether the run starts from the beginning on purpose.
        components: what the manager saves; None for all.

    Attributes:
        is_cleared: whether the state is known to come from the run, because it was saved before.
    """

    def __init__(
        self, store: Store, world: Collectives, held: HeldRun, *, start_over: bool, components: Sequence[str] | None
    ) -> None:
        self.is_cleared = False
        self.start_over = start_over
        self.left_behind = len(held.checkpoints)
        self._store = store
        self._world = world
        self._held = held
        self._is_export = components is not None and "trainer" not in components
        self._restored: weakref.ref[Live] | None = None
        self._loaded_at: int | None = None

    def loaded(self, run: Live | TrainState, step: int | None) -> None:
        """The manager has loaded from the run: what was restored in place comes from it, and no other attached run that may follow.

        A state that was loaded says itself where it comes from, and one that was made of its parts has gone on from its step. The
        state that it was loaded like is as fresh as before.
        """
        if isinstance(run, Live):
            self._restored = weakref.ref(run)
        elif step is None:
            self.is_cleared = True
        else:
            self._loaded_at = step

    def check(self, run: Live | TrainState) -> Descent | None:
        """Say what the first state to be saved descends from; None where the run is new, or that was asked before.

        Raises:
            RunNotRestored: where the run has checkpoints, and the state comes from none of them.
        """
        if self.is_cleared or self._follows(run):
            return None
        run_id, names = self._held.run_id, self._held.checkpoints
        runs = run.origin.runs

        def descent() -> Descent | None:
            if not names:
                return None
            if self.start_over:
                return BEGINNING
            if run_id not in runs and runs and self._are_exports():
                return None
            if run_id not in runs:
                raise RunNotRestored(
                    self._store.url,
                    expected="a state that comes from this run, which has checkpoints",
                    found=f"one that nothing was restored into, beside {', '.join(names[-3:])}",
                    fix="call manager.restore(live) before the loop, or go on with the state that trainfold.load or manager.load returns; "
                    "to leave these checkpoints behind on purpose, make the manager with start_over=True, or save into another directory",
                )
            return runs[run_id]

        found = on_all_ranks(self._world, descent)[self._world.rank]
        self.is_cleared = True
        return found

    def _follows(self, run: Live | TrainState) -> bool:
        """Whether a run follows what the manager has loaded."""
        if isinstance(run, Live):
            return self._restored is not None and self._restored() is run
        return self._loaded_at is not None and (run.trainer is None or run.trainer.step > self._loaded_at)

    def _are_exports(self) -> bool:
        """Whether neither the manager nor anything in the run has counters to go on from: weights beside the run of a loop that was resumed."""
        if not self._is_export:
            return False
        manifests = (read_manifest(self._store, name) for name in self._held.checkpoints)
        return all(each.name != "trainer" for manifest in manifests for each in manifest.components)

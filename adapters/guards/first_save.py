"""`FirstSave`: refuses to save a state into a run that it does not come from, unless the program asks for that."""

import weakref
from collections.abc import Sequence
from typing import final

import attrs

from trainfold.adapters.live.live import Live
from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.runs.scan import listed_run, read_manifest
from trainfold.backends.stores.os_errors import cannot_save
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.core.errors import CheckpointMissing, RunNotRestored
from trainfold.core.layout.world import Collectives
from trainfold.core.state.parent_checkpoint import BEGINNING, ParentCheckpoint
from trainfold.core.state.state import TrainState


@final
@attrs.frozen
class HeldRun:
    """What a run contains: its id, and the checkpoints with a manifest, complete or not; those that cannot be read now only where there is no other."""

    run_id: str
    checkpoints: tuple[str, ...]


def look(store: Store) -> HeldRun:
    """What a run contains now.

    Raises:
        SaveFailed: if that cannot be read: a run that does not answer now may hold checkpoints.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> look(MemoryStore())
        HeldRun(run_id='', checkpoints=())
    """
    inventory = listed_run(glimpse(store))
    if inventory.problem is not None and inventory.problem.error != CheckpointMissing.__name__:
        raise cannot_save(inventory.problem)
    known = tuple(entry.name for entry in inventory.entries if entry.head is not None)
    return HeldRun(inventory.run_id or "", known or tuple(entry.name for entry in inventory.maybe_newer(None)))


@final
class FirstSave:
    """What a manager checks before its first save: a second start that forgets to restore would abandon the first one.

    Args:
        store: the run.
        world: the ranks, each of which makes the same calls.
        held: what the run contained when its lock was taken; no other program has added to it since.
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
        self._components = components
        self._restored: weakref.ref[Live] | None = None
        self._loaded_at: int | None = None

    def loaded(self, run: Live | TrainState, step: int | None) -> None:
        """Note that the manager has loaded from the run.

        A live run that was restored in place comes from the run; another live run that is attached later does not. A loaded
        state carries its own origin, and a state made of its parts has a later step. The state that was passed as the
        pattern of a load stays a new one.
        """
        if isinstance(run, Live):
            self._restored = weakref.ref(run)
        elif step is None:
            self.is_cleared = True
        else:
            self._loaded_at = step

    def check(self, run: Live | TrainState) -> ParentCheckpoint | None:
        """Return what the first saved state descends from; None if the run is new, or the state was checked before.

        Raises:
            RunNotRestored: if the run has checkpoints, and the state does not come from any of them.
        """
        if self.is_cleared or self._follows(run):
            return None
        run_id, names = self._held.run_id, self._held.checkpoints
        runs = run.origin.runs

        def descent() -> ParentCheckpoint | None:
            if not names:
                return None
            if self.start_over:
                return BEGINNING
            if run_id not in runs and runs and self._are_exports(run):
                return None
            if run_id not in runs:
                raise RunNotRestored(
                    self._store.url,
                    expected="a state that comes from this run, which has checkpoints",
                    found=f"a state that was not restored from {', '.join(names[-3:])}",
                    fix="call manager.restore(live) before the loop, or continue with the state that trainfold.load or manager.load returns; "
                    "to abandon these checkpoints on purpose, make the manager with start_over=True, or save into another directory",
                )
            return runs[run_id]

        found = on_all_ranks(self._world, descent, doing="check what its state comes from")[self._world.rank]
        self.is_cleared = True
        return found

    def _follows(self, run: Live | TrainState) -> bool:
        """Whether a run continues what the manager has loaded."""
        if isinstance(run, Live):
            return self._restored is not None and self._restored() is run
        return self._loaded_at is not None and (run.trainer is None or run.trainer.step > self._loaded_at)

    def _are_exports(self, run: Live | TrainState) -> bool:
        """Whether neither the manager nor any checkpoint has counters: weights saved beside the run of a loop that was resumed."""
        selections = (self._components, run.components if isinstance(run, Live) else None)
        if all(each is None or "trainer" in each for each in selections):
            return False
        manifests = (read_manifest(self._store, name) for name in self._held.checkpoints)
        return all(each.name != "trainer" for manifest in manifests for each in manifest.components)

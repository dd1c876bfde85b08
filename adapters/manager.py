"""`CheckpointManager`: saves a run when it is due, resumes it, and keeps the last few checkpoints."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType, UnionType
from typing import Any, final

import attrs

from trainfold.adapters.live import Live
from trainfold.backends import runs
from trainfold.backends.best_file import best_checkpoint
from trainfold.backends.inventory import check_place, examine, read_inventory
from trainfold.backends.run_save import SaveResult
from trainfold.core.components import validate_components
from trainfold.core.contract import checked_contract
from trainfold.core.errors import InvalidArgument, InvalidState, ResumeRefused, TrainfoldError
from trainfold.core.given import mapping_given, names_given
from trainfold.core.inventory import lineage
from trainfold.core.policy import check_policy
from trainfold.core.retention import check_keep_last, plan_retention
from trainfold.core.save_due import check_cadence, should_save
from trainfold.core.scalars import shown
from trainfold.core.state import TrainState

_LOG = logging.getLogger("trainfold")


@final
@attrs.frozen
class Restored:
    """What `CheckpointManager.restore` did.

    Attributes:
        run: where the run is.
        step: the step that the run goes on from; 0 for a fresh start.
        is_fresh: whether there was nothing to resume.
    """

    run: str
    step: int
    is_fresh: bool


@final
class CheckpointManager:
    """Saves and resumes one run, synchronously: a save is durable when it returns.

    It holds the run's lock from its making until `close`, so that no second process writes into the run. Before each
    save it looks whether the lock is still its own: a forked child is refused (`RunLocked`), and so is a save into a
    directory that was removed or replaced meanwhile (`RunReplaced`).

    Args:
        run: a directory, or a store.
        every: save at each multiple of so many optimizer steps; None to save only when told to.
        keep_last: keep so many of the newest complete checkpoints; 0 or None for all (E01). The one that ``save_best``
            named stays beside them (E02).
        mode: ``"sync"``.
        components: which components are saved and restored; None for all.
        policy: what to do about each kind of difference at a resume; see ``trainfold.plan``.
        contract: what must be equal at a resume, beside what the state, or the live run, says itself.

    Raises:
        InvalidArgument: for an argument that cannot be; nothing was touched.
        UnsupportedLeaf: for a value of the contract that has no exact form.
        CheckpointForeign: if the place holds something else than a run; nothing is written there.
        RunLocked: if another process saves into this run.

    Examples:
        >>> import torch, trainfold
        >>> from trainfold.adapters.live import attach
        >>> from trainfold.backends.memory import MemoryStore
        >>> store = MemoryStore()
        >>> with CheckpointManager(store, every=2, keep_last=1) as manager:
        ...     live = attach(torch.nn.Linear(1, 1))
        ...     fresh = manager.restore(live).is_fresh
        ...     saved = [manager.step(live) for _ in range(4) if live.advance(samples=1)]
        >>> fresh, [result and result.step for result in saved]
        (True, [None, 2, None, 4])
    """

    def __init__(  # noqa: PLR0913 (one keyword for each decision)
        self,
        run: runs.Run,
        *,
        every: int | None = None,
        keep_last: int | None = None,
        mode: str = "sync",
        components: Sequence[str] | None = None,
        policy: Mapping[str, str] | None = None,
        contract: Mapping[str, Any] | None = None,
    ) -> None:
        _check_mode(mode)
        self._every = check_cadence(every)
        self._keep_last = check_keep_last(keep_last)
        self._components = names_given(components)
        self._policy = check_policy(policy)
        self._contract = checked_contract(mapping_given("contract", contract))
        self._last_saved: int | None = None
        self._proved: set[str] = set()  # complete checkpoints do not change, so each is read once
        self._store = runs.open_store(run)
        self._held = ExitStack()
        check_place(self._store)  # before the lock, which is a file
        self._held.enter_context(self._store.lock())
        self._is_open = True

    def restore(self, live: Live, *, step: int | None = None, reset: Mapping[str, str] | None = None) -> Restored:
        """Make a live run what its newest whole checkpoint says; where there is none, leave it as it is.

        Args:
            live: the attached objects; unchanged if anything is wrong (V12).
            step: an explicit step; one that is not there is an error (V02).
            reset: component -> why it starts anew on purpose.

        Returns:
            What was done. It is logged as well: a fresh start as a warning, which Python shows by default, because a
            path that was mistyped looks the same.

        Raises:
            InvalidArgument: for an argument that cannot be.
            ResumeRefused: with every reason why a resume would not be exact.
            RestoreRefused: if the live objects cannot take the state.
        """
        self._check_open()
        _check_run(live, Live)
        reset = mapping_given("reset", reset)
        names = self._names(live)
        like = live.capture()
        extra = {name: value for name, value in like.extra.items() if name not in live.pending}  # owed to nobody yet
        try:
            state = runs.load(
                self._store,
                like=like.evolve(extra=extra),
                step=step,
                components=names,
                policy=self._policy,
                reset=reset,
                contract=self._contract,
            )
        except ResumeRefused as refused:
            if step is not None or not refused.refusal.finds_nothing:
                raise
            _LOG.warning("%s holds no checkpoint: the run starts fresh", self._store.url)
            return Restored(self._store.url, live.progress.step, is_fresh=True)
        live.restore(state, components=names)
        self._last_saved = None if state.trainer is None else state.trainer.step
        _LOG.info("resumed %s at step %s", self._store.url, self._last_saved)
        return Restored(self._store.url, live.progress.step, is_fresh=False)

    def step(self, live: Live) -> SaveResult | None:
        """Save if this boundary is due; call it after each ``live.advance()``.

        Inside an accumulation window nothing is saved; the boundary that closes it decides (A06).

        Args:
            live: the attached objects.

        Returns:
            What was saved, or None.

        Raises:
            IncompleteWindow: if it is due, and the run is not at a boundary.
            SaveFailed: if the save failed; the earlier checkpoints are untouched.
        """
        self._check_open()
        _check_run(live, Live)
        if live.is_in_window or not should_save(live.progress.step, every=self._every, last_saved=self._last_saved):
            return None
        return self.save(live)

    def save(self, run: Live | TrainState) -> SaveResult:
        """Save now, whether it is due or not.

        Args:
            run: the attached objects, at a boundary; or a state.

        Returns:
            What was saved; it is durable.

        Raises:
            IncompleteWindow: if the live run is not at a boundary.
            SaveFailed: if the save failed; the earlier checkpoints are untouched.
        """
        self._check_open()
        _check_run(run, Live | TrainState)
        state = run.capture() if isinstance(run, Live) else run
        names = self._names(run) if isinstance(run, Live) else self._components
        result = runs.save(state, self._store, components=names, contract=self._contract, lock=False)
        self._last_saved = result.step
        self._proved.add(result.checkpoint)
        self._retain(result)
        return result

    def close(self) -> None:
        """Let go of the run; calling it again does nothing (D07).

        It saves nothing: the last state is saved by `step`, or by a call of `save` before.
        """
        self._is_open = False
        self._held.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _names(self, live: Live | TrainState) -> tuple[str, ...] | None:
        extra = live.names if isinstance(live, Live) else tuple(live.extra)
        return validate_components(self._components, declared=extra)

    def _retain(self, result: SaveResult) -> None:
        """Delete what the budget has no room for: after the commit (E03); a failure is a warning (E04)."""
        if not self._keep_last:
            return
        try:
            complete = self._complete()
            written = (result.checkpoint, result.step)
            protected = {best_checkpoint(self._store) or ""}
            for name in plan_retention(complete, keep_last=self._keep_last, written=written, protected=protected):
                self._store.delete(f"{name}/")
                self._proved.discard(name)
        except (TrainfoldError, OSError) as error:
            _LOG.warning(
                "%s: old checkpoints could not be deleted, and will be tried again: %s", self._store.url, error
            )

    def _complete(self) -> list[tuple[str, int]]:
        """The complete checkpoints of the present lineage; what a rewind left behind is not this run's to delete (E16)."""
        inventory = read_inventory(self._store)
        found = []
        for entry in lineage(inventory):
            if entry.head is None:
                continue
            if entry.name not in self._proved:
                proved = examine(self._store, inventory, entry.name).entry(entry.name)
                if proved is None or proved.problem is not None:
                    continue
                self._proved.add(entry.name)
            found.append((entry.name, entry.head.step))
        return found

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidState(
                "CheckpointManager",
                expected="an open manager",
                found="a closed one",
                mend="make another manager for the run",
            )


@final
class DisabledManager:
    """A manager that does nothing, for runs that are not to be saved (O07)."""

    def restore(self, live: Live, *, step: int | None = None, reset: Mapping[str, str] | None = None) -> Restored:
        """Leave the run as it is."""
        del step, reset
        return Restored("", live.progress.step, is_fresh=True)

    def step(self, live: Live) -> None:
        """Save nothing."""

    def save(self, run: Live | TrainState) -> None:
        """Save nothing."""

    def close(self) -> None:
        """Hold nothing."""

    def __enter__(self) -> "DisabledManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_run(run: object, kinds: type | UnionType) -> None:
    if not isinstance(run, kinds):
        raise InvalidArgument(
            "CheckpointManager",
            expected="a live run",
            found=shown(run),
            mend="give it what attach(model, optimizer, ...) returned",
        )


def _check_mode(mode: str) -> None:
    if mode == "async":
        raise InvalidArgument(
            "CheckpointManager.mode",
            expected="'sync'",
            found="'async', which this version cannot do (D10)",
            mend="pass mode='sync': a save then returns when it is durable",
        )
    if mode != "sync":
        raise InvalidArgument("CheckpointManager.mode", expected="'sync'", found=repr(mode), mend="pass mode='sync'")

"""What must hold for a disk after a crash, and whether it does: what was promised is found, and what is found is whole."""

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import final

import attrs

import trainfold
from crash.disk.disk import Disk
from crash.disk.effects import Effect, Mark
from crash.disk.frozen_store import Files, FrozenStore, materialise, visible
from crash.disk.states import Budget, CrashState, crash_states, digest_of_files
from crash.effort import places
from crash.saves.scenarios import SHM, Doing, Make, digest_of_state, record, state_at
from trainfold.backends.runs.best.best_file import load_best
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.protocol import Store
from trainfold.core.best.record import make_best_record
from trainfold.core.errors import ResumeRefused, TrainfoldError
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.quarantine_json import QUARANTINE_FILE, quarantine_from_json

_FURTHER = 90  # later than any step that the scenarios save


@final
@attrs.frozen
class Promised:
    """What was acknowledged to a program by the time of a crash.

    Attributes:
        newest: the digest of the state whose save returned last; None before the first.
        standing: checkpoint -> the digest of its state, for all acknowledged checkpoints that no operation deletes or replaces.
        in_flight: the operation that had started and not returned.
        best: the score that was written last.
        best_perhaps: a score whose writer was killed, so it may exist or not.
        attempts: the number of load attempts that was recorded last.
        attempts_perhaps: another number, whose writer was killed.
        saved: every digest that a checkpoint of that name may have.
        perhaps: the digests of states whose save has failed since; each may exist or not.
        known: every checkpoint that was ever acknowledged, even if it has been deleted since.
    """

    newest: str | None = None
    standing: tuple[tuple[str, str], ...] = ()
    in_flight: Doing | None = None
    best: float | None = None
    best_perhaps: float | None = None
    attempts: int = 0
    attempts_perhaps: int | None = None
    saved: tuple[tuple[str, str], ...] = ()
    perhaps: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()

    def after(self, mark: Mark) -> "Promised":
        """What is promised after one more mark."""
        what: Doing = mark.value
        name = directory_of(what.step)
        if what.attempts is not None:
            newest = what.digest or self.newest  # one attempt too many, and an older checkpoint is loaded
            ended = attrs.evolve(self, in_flight=None, attempts=what.attempts, newest=newest)
            return ended if mark.what == "ack" else attrs.evolve(self, in_flight=what)
        if mark.what == "begin" and what.best is not None:
            return attrs.evolve(self, in_flight=what)
        if what.best is not None:
            return attrs.evolve(self, in_flight=None, best=what.best)
        if mark.what == "fail":
            return attrs.evolve(self, in_flight=None, perhaps=(*self.perhaps, what.digest))
        kept = tuple(pair for pair in self.standing if pair[0] != name)
        if mark.what == "begin":
            return attrs.evolve(self, in_flight=what, standing=kept, saved=(*self.saved, (name, what.digest)))
        kept = tuple(pair for pair in kept if pair[0] not in what.gone)
        standing, known = (*kept, (name, what.digest)), self.known | {name}
        return attrs.evolve(self, newest=what.digest, standing=standing, in_flight=None, perhaps=(), known=known)


def promises(effects: Sequence[Effect], before: Promised | None = None) -> list[Promised]:
    """The promises after each prefix of the effects."""
    found = [before or Promised()]
    for effect in effects:
        found.append(found[-1].after(effect) if isinstance(effect, Mark) else found[-1])
    return found


@final
@attrs.frozen
class Found:
    """What a program finds on a disk.

    Attributes:
        newest: the digest of the state that `trainfold.load` returns; None if it reports that there is no checkpoint.
        whole: checkpoint -> the digest of its state, for all that have a manifest.
        best: the score that the run continues with.
        attempts: the recorded number of load attempts.
        wrong: what must not be, regardless of the promises.
    """

    newest: str | None
    whole: tuple[tuple[str, str], ...]
    best: float | None
    attempts: int = 0
    wrong: tuple[str, ...] = ()


def look(store: Store, make: Make = state_at) -> Found:
    """Recover the newest state, and read everything else as well."""
    wrong: list[str] = []
    like = make(0, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            newest = digest_of_state(trainfold.load(store, like=like))
        except ResumeRefused as refused:
            newest = None
            if not refused.refusal.finds_nothing:
                wrong.append(f"refused: {refused}")
        except (TrainfoldError, OSError) as error:
            newest = None
            wrong.append(f"load: {type(error).__name__}: {error}")
        whole = []
        for entry in read_inventory(store).entries:
            if entry.head is None:
                if entry.problem is None or entry.problem.error != "CheckpointTorn":
                    wrong.append(f"{entry.name}: {entry.problem}")
                continue
            try:
                step = entry.head.step
                whole.append((entry.name, digest_of_state(trainfold.load(store, like=like, step=step))))
            except (TrainfoldError, OSError) as error:
                wrong.append(f"{entry.name} has a manifest and is not whole: {error}")
        best = _best_of(store, wrong)
    # the loaded state shows whether it was right to skip them
    expected = ("a save that did not finish", "CheckpointQuarantined")
    wrong += [f"warned: {each.message}" for each in caught if not any(text in str(each.message) for text in expected)]
    return Found(newest, tuple(whole), best, _attempts_of(store, wrong), tuple(wrong))


def _best_of(store: Store, wrong: list[str]) -> float | None:
    try:
        record = load_best(store, make_best_record(metric="loss", direction="min"))
    except TrainfoldError as error:
        wrong.append(f"best: {error}")
        return None
    return None if record.score is None else float(record.score)


def _attempts_of(store: Store, wrong: list[str]) -> int:
    if store.size(QUARANTINE_FILE) is None:
        return 0
    try:
        return sum(record.attempts for record in quarantine_from_json(store.read(QUARANTINE_FILE), "").records)
    except TrainfoldError as error:
        wrong.append(f"attempts: {error}")
        return 0


def broken(found: Found, promised: Promised) -> list[str]:
    """The promises that are broken by what was found."""
    wrong = list(found.wrong)
    now = promised.in_flight
    saving = now.digest or None if now is not None else None
    if found.newest not in {promised.newest, saving, *promised.perhaps} or (
        found.newest is None and promised.newest is not None
    ):
        wrong.append(f"recovered {found.newest}, but {promised.newest} was acknowledged (saving: {saving})")
    may_go = now.gone if now is not None and found.newest == saving else ()  # not before their replacement exists
    lost = [name for name, digest in promised.standing if (name, digest) not in found.whole and name not in may_go]
    wrong += [f"{name} was acknowledged and is not there as it was saved" for name in lost]
    strange = [name for name, digest in found.whole if (name, digest) not in promised.saved]
    wrong += [f"{name} has a state that was never saved there" for name in strange]
    writing = None if now is None else now.best
    if found.best not in {promised.best, promised.best_perhaps, writing} or (
        found.best is None and promised.best is not None
    ):
        wrong.append(f"the best is {found.best}, but {promised.best} was acknowledged")
    recording = None if now is None else now.attempts
    if found.attempts not in {promised.attempts, promised.attempts_perhaps, recording}:
        wrong.append(f"{found.attempts} attempts are recorded, but {promised.attempts} was acknowledged")
    return wrong


def leading(files: Files, promised: Promised) -> list[str]:
    """The pointers that lead to a checkpoint that is not committed."""
    links = {path: data for path, data in files.items() if isinstance(data, str) and not path.startswith("run/.")}
    there = {path.split("/")[1] for path in files if path.endswith("/manifest.json")}
    ahead = {path: target for path, target in links.items() if target not in there | promised.known}
    return [f"{path} leads to {target}, which is not a checkpoint" for path, target in ahead.items()]


def go_on(files: Files, promised: Promised, make: Make = state_at) -> list[str]:
    """What goes wrong when a program continues from there without manual repair: it takes the lock, which tidies up, and saves."""
    with TemporaryDirectory(dir=SHM) as top:
        materialise(files, top)
        run = Path(top, "run")
        if run.exists():
            with LocalStore(run).lock():
                left = sorted(staged(run))
            if left:
                return [f"left after the lock was taken: {left}"]
        wrong = broken(look(LocalStore(run), make), promised)
        again = (
            [now.step] if (now := promised.in_flight) is not None and now.digest else []
        )  # over the remains that the crash left
        for step in (*again, _FURTHER):
            state = make(step, 9)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    trainfold.save(state, run)
                    found = digest_of_state(trainfold.load(run, like=make(0, 0)))
            except TrainfoldError as error:
                return [*wrong, f"step {step} cannot be saved after the crash: {error}"]
            if found != digest_of_state(state):
                wrong.append(f"step {step}, saved after the crash, is not what is loaded")
        left = sorted(staged(run))
        after = look(LocalStore(run), make)
    replaced = {directory_of(step) for step in (*again, _FURTHER)} | set(() if now is None else now.gone)
    lost = [pair for pair in promised.standing if pair not in after.whole and pair[0] not in replaced]
    return [
        *wrong,
        *after.wrong,
        *(f"after it went on: lost {pair}" for pair in lost),
        *(f"litter: {name}" for name in left),
    ]


def staged(run: str | os.PathLike[str]) -> Iterator[str]:
    """The files in a run that would need a manual cleanup."""
    for above, _, names in os.walk(run):
        yield from (f"{above}/{name}" for name in names if name.startswith(".") and name != ".lock")


@final
class Examiner:
    """Checks states, and equal ones only once.

    Args:
        go_on_share: the share of the disks, including staged files, from which a program continues.
        make: makes the state of a step and a variant, which the program saves.

    Attributes:
        looked: from how many different views of a run a state was recovered.
        went_on: from how many different disks a program continued.
    """

    def __init__(self, *, go_on_share: float, seed: int = 0, make: Make = state_at) -> None:
        self.make = make
        self.looked = 0
        self.went_on = 0
        self._share = go_on_share
        self._random = Random(seed)
        self._views: dict[bytes, Found] = {}
        self._met: set[tuple[bytes, frozenset[str], Promised]] = set()

    def wrong(self, state: CrashState, promised: Promised) -> list[str]:
        """What is wrong with a state, if anything."""
        wrong = [*broken(self.found(state), promised), *leading(state.files, promised)]
        if not wrong and self.is_new(state, promised) and self._random.random() < self._share:
            self.went_on += 1
            wrong = go_on(state.files, promised, self.make)
        return wrong

    def found(self, state: CrashState) -> Found:
        """What a program finds in a state."""
        seen = visible(state.files)
        key = digest_of_files(seen)
        if key not in self._views:
            self._views[key] = look(FrozenStore(seen), self.make)
            self.looked += 1
        return self._views[key]

    def is_new(self, state: CrashState, promised: Promised) -> bool:
        """Whether no earlier state had the same files; staged files are compared by name only."""
        seen = visible(state.files)
        met = (digest_of_files(seen), frozenset(state.files) - frozenset(seen), promised)
        is_new = met not in self._met
        self._met.add(met)
        return is_new


def crash_again(state: CrashState, promised: Promised, examiner: Examiner, budget: Budget) -> tuple[int, list[str]]:
    """Continue from a state and crash again: return how many states that leaves, and what is wrong with the first bad one."""
    found = examiner.found(state)
    # everything on the disk at boot is durable
    known = Promised(found.newest, found.whole, best=found.best, attempts=found.attempts, saved=promised.saved,
                     known=promised.known | {name for name, _ in found.whole})  # fmt: skip
    now = promised.in_flight
    step = now.step if now is not None and now.digest else _FURTHER
    return _go_on_and_crash(Disk.of(state.files), step, known, examiner, budget)


def kill_then_crash(disk: Disk, promised: Promised, examiner: Examiner, budget: Budget) -> tuple[int, list[str]]:
    """The process is killed, another one continues, and then the machine crashes. A kill makes nothing durable."""
    now = promised.in_flight
    perhaps = (now.digest,) if now is not None and now.digest else ()
    step = now.step if perhaps and now is not None else _FURTHER
    known = attrs.evolve(
        promised,
        in_flight=None,
        standing=tuple(pair for pair in promised.standing if now is None or pair[0] not in now.gone),
        perhaps=(*promised.perhaps, *perhaps),
        best_perhaps=None if now is None else now.best,
        attempts_perhaps=None if now is None else now.attempts,
    )
    return _go_on_and_crash(disk, step, known, examiner, budget)


def _go_on_and_crash(
    disk: Disk, step: int, known: Promised, examiner: Examiner, budget: Budget
) -> tuple[int, list[str]]:
    effects = record(lambda scene: scene.save(step, variant=9), disk, make=examiner.make)
    promised, count = promises(effects, known), 0
    for second in crash_states(effects, budget, disk, places=places(effects)):
        count += 1
        if wrong := examiner.wrong(second, promised[second.done]):
            return count, [f"after {second}", *wrong]
    return count, []

"""Every error of trainfold. Each says where it happened, what was expected, what was found, and how to fix it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Protocol

from trainfold.core.printable import printable

LISTING: Final = set[str]()  # the names of the errors whose text has lines of its own


class _Refused(Protocol):
    """A `Refusal`. Its class is not imported here, because every module imports this one."""

    @property
    def reasons(self) -> Sequence[Any]: ...

    @property
    def finds_nothing(self) -> bool: ...

    @property
    def listed(self) -> str: ...

    @property
    def fix(self) -> str: ...

    def about_optional(self, optional: Collection[str]) -> Mapping[str, str]: ...


class TrainfoldError(Exception):
    """The base of all errors here; programs read its fields, people read its text.

    Args:
        where: what it concerns: a leaf path, a file, a run, an argument.
        expected: what was promised or asked for.
        found: what is there instead.
        fix: the next move, in the imperative.

    Attributes:
        step: the optimizer step of the save or the checkpoint that it concerns; None without one.
        rank: the rank that failed, if there are several; None if there is one, or if all failed alike.

    Examples:
        >>> print(InvalidState("state.trainer.step", expected=">= 0", found=-1, fix="start at step 0"))
        state.trainer.step: expected >= 0, found -1; start at step 0
    """

    exit_code: ClassVar[int] = 1
    step: int | None = None
    rank: int | None = None
    # whether its text has lines of its own; otherwise a line break comes from a value
    has_lines: ClassVar[bool] = False

    def __init_subclass__(cls, *, exit_code: int | None = None, has_lines: bool = False) -> None:
        """Set the class's own exit code and form; without its own it has those of its base."""
        super().__init_subclass__()
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        cls.has_lines = cls.has_lines or has_lines
        if cls.has_lines and cls.__name__[0] != "_":
            LISTING.add(cls.__name__)

    def __init__(self, where: str, *, expected: object, found: object, fix: str) -> None:
        super().__init__(where, expected, found, fix)
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.where}: expected {self.expected}, found {self.found}; {self.fix}"
        return printable(text, keep="\n" if self.has_lines else "")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.where, self.expected, self.found, self.fix), self._placed())

    def _placed(self) -> dict[str, int]:
        return {name: value for name in ("step", "rank") if (value := getattr(self, name)) is not None}


def _rebuild(cls: type[TrainfoldError], where: str, expected: object, found: object, fix: str) -> TrainfoldError:
    return cls(where, expected=expected, found=found, fix=fix)


def place(error: BaseException, *, step: int | None = None, rank: int | None = None) -> None:
    """Record the step and the rank of an error in its fields and in a note; what is already set stays.

    To place an error is to say where it happened; it has nothing to do with memory or with the location of a run.

    Args:
        error: any error; one that is not trainfold's gets only the note.
        step: the step of the save or the checkpoint; None if it is not known.
        rank: the rank that failed; None if there is one.

    Examples:
        >>> error = InvalidState("state", expected="a step", found="none", fix="count")
        >>> place(error, step=120, rank=1)
        >>> error.step, error.rank, error.__notes__
        (120, 1, ['at step 120', 'on rank 1'])
    """
    for name, words, value in (("step", "at step", step), ("rank", "on rank", rank)):
        note = f"{words} {value}"
        if value is None or getattr(error, name, None) is not None or note in getattr(error, "__notes__", ()):
            continue
        if isinstance(error, TrainfoldError):
            setattr(error, name, value)
        error.add_note(note)


@contextmanager
def placed(*, step: int | None) -> Iterator[None]:
    """Record the step of any error that is raised inside; see `place`.

    Args:
        step: the step of the save, the checkpoint or the decision; None if it is not known.
    """
    try:
        yield
    except Exception as error:
        place(error, step=step)
        raise


def error_text(error: BaseException) -> str:
    """The class and the text of an error, or the class alone if its own text fails.

    Examples:
        >>> error_text(ValueError("too long"))
        'ValueError: too long'
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 its own text failed
        return type(error).__name__


class InvalidState(TrainfoldError):
    """A state, or a part of one, breaks one of its own rules."""


class InvalidArgument(TrainfoldError, ValueError):
    """An argument has a value that can never work; raised before anything is touched."""


class InvalidBatch(InvalidArgument):
    """A batch is empty, ragged in dimension 0, or has fewer samples than microbatches."""


class BatchNotDivisible(InvalidArgument):
    """A number of samples or tokens is not divisible into the microbatches asked for."""


class IncompleteWindow(TrainfoldError):
    """The stream ended inside an accumulation window, and the policy is to raise."""


class InvalidSchedule(InvalidArgument):
    """A schedule's arguments contradict each other, such as a decay of zero steps that is not disabled."""


class HorizonUnknown(InvalidArgument):
    """The length of the run is not known: no total, no maximum of steps, no length of the data."""


class ScheduleMismatch(TrainfoldError):
    """The schedule of the step is not the one that the state was trained with."""


class ContractMismatch(TrainfoldError):
    """A step differs from the one that trained the state in something that a resume must keep."""


class UnknownComponent(InvalidArgument):
    """A component name that no state has; the known names are listed."""


class SourceFailed(TrainfoldError):
    """A source of weights raised an error of its own, which is the cause, or yielded something else than tensors with names."""


class UnsupportedLeaf(TrainfoldError, TypeError):
    """A leaf of a type that the format cannot hold without pickle."""


class UnsupportedOptimizer(InvalidArgument):
    """An optimizer that cannot be a pure function of gradients, such as one that needs a closure."""


class DataPositionMismatch(TrainfoldError):
    """A data position that this dataset or loader cannot take: another length, batch size or kind."""


class UnattachedOptimizer(InvalidState):
    """An optimizer that is not attached steps parameters of a live run; it would restart at a resume."""


class HiddenStateRefused(InvalidState, has_lines=True):
    """No component saves this state, which changes with training; the run is attached with ``strict=True``."""


class HalfRestored(InvalidState):
    """A restore failed after it had begun to overwrite what cannot be put back: the live objects hold parts of two states. End the process."""


class SwappedWeights(InvalidState):
    """The averaged weights of an attached object are in the model, so a save would lose the raw ones."""


class HiddenState(UserWarning):
    """No component saves this state, which changes with training; it would restart at a resume."""


class StaleCopy(UserWarning):
    """A component is a copy of the model as it was before it got its initial weights."""


class OptionalLeftOut(UserWarning):
    """An optional component that cannot be saved or restored is left out; everything else is not."""


class NothingSelected(UserWarning):
    """A selection that has no component of those that there are: nothing is loaded, or a checkpoint holds its step alone."""


class MastersRebuilt(UserWarning):
    """An optimizer state without its fp32 masters; they were cloned from low-precision parameters."""


class SameBatch(UserWarning):
    """Ranks of a step that train on one batch, although each is to have a share of its own."""


class LateWork(UserWarning):
    """The server of DiLoCo took nothing of what a worker has trained."""


class StateDonated(TrainfoldError):
    """A leaf of a state that a donating step has consumed; the new state has its storage."""


class SharedStorage(TrainfoldError):
    """Two leaves of a state to be donated share storage, so an update of one would change the other."""


class NonFinite(TrainfoldError, ArithmeticError):
    """The loss or the gradient norm is not finite; nothing was updated.

    Attributes:
        skipped: the state with this batch's samples counted, in ``trainer`` and in ``dataset`` if that is a `DataCursor`, and
            nothing else changed. Continue from it to skip the batch. The caller advances any other position in the data.
    """

    skipped: object = None


class StepNotRepeated(TrainfoldError, ArithmeticError):
    """A step had other bits when it ran a second time from the same state, or on another rank."""


class _Listing(TrainfoldError, has_lines=True):
    """The base of errors that list several causes, one on each line."""

    def __init__(self, where: str, causes: Sequence[object], *, expected: str, found: str, fix: str) -> None:
        shown = "\n".join(
            f"  {error_text(each) if isinstance(each, TrainfoldError) else printable(str(each))}" for each in causes
        )
        super().__init__(where, expected=expected, found=f"{found}:\n{shown}\n", fix=fix)
        self._causes = causes

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.where, self._causes), self._placed())


class SpecMismatch(_Listing):
    """Two trees differ. The text lists all differences at once; ``differences`` has them in tree order."""

    def __init__(self, where: str, differences: Sequence[object]) -> None:
        found, fix = f"{len(differences)} differences", "build the state as it was built when it was saved"
        super().__init__(where, differences, expected="the same leaves, shapes and dtypes", found=found, fix=fix)
        self.differences = differences


class RestoreRefused(_Listing):
    """A live run cannot take a state; nothing was changed. The text lists every reason; ``reasons`` has them as errors."""

    def __init__(self, where: str, reasons: tuple[TrainfoldError, ...]) -> None:
        found, fix = f"{_reasons(len(reasons))} against it", "do as each reason says; nothing was changed"
        super().__init__(where, reasons, expected="a state that these objects can take", found=found, fix=fix)
        self.reasons = reasons


class WeightsRefused(_Listing, InvalidState):
    """The weights of a model cannot be taken from these sources; nothing was read. The text lists every reason; ``reasons`` has them as errors."""

    def __init__(self, where: str, reasons: tuple[TrainfoldError, ...]) -> None:
        found, fix = f"{_reasons(len(reasons))} against it", "do as each reason says; nothing was read"
        super().__init__(
            where, reasons, expected="each tensor from one source, in the model's form", found=found, fix=fix
        )
        self.reasons = reasons


class CaptureRefused(_Listing):
    """A live run cannot be saved as it is. The text lists every reason; ``reasons`` has them as errors."""

    def __init__(self, where: str, reasons: tuple[TrainfoldError, ...]) -> None:
        found, fix = (
            f"{_reasons(len(reasons))} why every save would fail",
            (
                "change what they name now, and not after the steps up to the first save; what need not be saved is left out "
                "with CheckpointManager(components=[...]), where manager.restore(live) comes before the loop"
            ),
        )
        super().__init__(where, reasons, expected="a run that can be saved", found=found, fix=fix)
        self.reasons = reasons


class CheckpointError(TrainfoldError, exit_code=10):
    """The base of everything that can be wrong with a checkpoint or a run on a store."""


class CheckpointMissing(CheckpointError, exit_code=11):
    """The run, or the step in it, does not exist."""


class RunEmpty(CheckpointMissing, exit_code=12):
    """The run exists and holds no complete checkpoint."""


class CheckpointTorn(CheckpointError, exit_code=13):
    """Files of a checkpoint are missing or have another size than the manifest says."""


class CheckpointDamaged(CheckpointError, exit_code=14):
    """Bytes of a checkpoint differ from those that were written: a digest does not match."""


class CheckpointUnreadable(CheckpointDamaged):
    """The device failed to read a checkpoint. Its bytes may still be intact: this error does not prove damage."""


class CheckpointForeign(CheckpointError, exit_code=15):
    """A directory or file was not written by trainfold, or belongs to another run."""


class FutureVersion(CheckpointError, exit_code=16):
    """A checkpoint written by a newer trainfold, in a schema that this one does not know."""


class CheckpointHostile(CheckpointError, exit_code=17):
    """Contents that trainfold never writes and that could harm a reader: escapes, links, overlaps, absurd sizes."""


class CheckpointQuarantined(CheckpointError, exit_code=18):
    """A checkpoint was found damaged, or loading it killed the process too often; it is passed over."""


class RunDamaged(CheckpointError, exit_code=19):
    """The run had a whole checkpoint and has lost it, as after an interrupted copy; it is not a new run."""


class ResumeRefused(CheckpointError, exit_code=20, has_lines=True):
    """A plan to resume was refused. The text lists every reason; ``refusal`` is the `Refusal`, with the reasons as values."""

    def __init__(self, where: str, refusal: _Refused) -> None:
        found = f"{_reasons(len(refusal.reasons))} against it:\n{refusal.listed}\n"
        super().__init__(where, expected="a checkpoint that continues this run exactly", found=found, fix=refusal.fix)
        self.refusal = refusal

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.where, self.refusal), self._placed())


class ManagerUnusable(TrainfoldError):
    """The base of everything that can be wrong with a checkpoint manager that a config names."""


class ManagerPathInvalid(ManagerUnusable):
    """The path of a manager is not ``package.module.Class``."""


class ManagerNotAllowed(ManagerUnusable):
    """The path of a manager does not start with a prefix on the allow-list; nothing was imported."""


class ManagerNotImportable(ManagerUnusable):
    """The module of a manager cannot be imported; the cause says why."""


class ManagerNotFound(ManagerUnusable):
    """The module of a manager has no such class."""


class ManagerIncomplete(ManagerUnusable):
    """A path does not name a class with all the methods of `CheckpointManagerLike`; the missing ones are listed."""


class ManagerSignatureMismatch(ManagerUnusable):
    """Methods of a manager cannot be called as trainfold calls them; every one is listed."""


class ManagerNotBuilt(ManagerUnusable):
    """The class of a manager raised when it was called with the config; the cause says why."""


class SaveFailed(CheckpointError, exit_code=30):
    """A save did not become a checkpoint; the earlier ones are untouched."""


class NoSpace(SaveFailed, exit_code=31):
    """The filesystem does not have room for the planned bytes; nothing was written."""


class NotWritable(SaveFailed, exit_code=32):
    """The run's directory cannot be written."""


class RunLocked(SaveFailed, exit_code=33):
    """Another process is saving into this run."""


class CommitConflict(SaveFailed, exit_code=34):
    """Another writer committed this name in the meantime."""


class RunReplaced(SaveFailed, exit_code=35):
    """The directory that this process saves into was removed, moved or replaced by another one."""


class RunNotRestored(SaveFailed, exit_code=37):
    """The run has checkpoints, but the state to save does not descend from any of them: a restore was forgotten."""


class PeerRefused(TrainfoldError):
    """Another program on the network is not the one that is meant, or has sent what it must not."""


class PeerLost(TrainfoldError):
    """Another program on the network has ended, or has not answered in time."""


class RankFailed(TrainfoldError, has_lines=True):
    """A rank failed, so every rank raises this error, which names the failed rank and repeats the lines of its error.

    Attributes:
        has_reported: whether that rank has come to the call and reported its error. Otherwise it has ended or hangs, and may still be writing.
        is_silent: whether that rank has given no sign: it was killed, or hangs.
    """

    has_reported: bool = False
    is_silent: bool = False

    def _placed(self) -> dict[str, int]:
        known = {name: True for name in ("has_reported", "is_silent") if getattr(self, name)}
        return super()._placed() | known


def rank_failed(rank: int, where: str | None = None, *, expected: str, found: object, fix: str) -> RankFailed:
    """The error of the other ranks if one has failed and reported it.

    Args:
        rank: the one that failed.
        where: what it concerns; None for the rank itself.
        expected: what it should have done.
        found: its error.
        fix: the next move.

    Examples:
        >>> rank_failed(1, expected="success", found="no space", fix="make room").rank
        1
    """
    error = RankFailed(where or f"rank {rank}", expected=expected, found=found, fix=fix)
    error.rank, error.has_reported = rank, True
    return error


class SaveFailedElsewhere(SaveFailed, RankFailed, exit_code=36, has_lines=True):
    """A save failed because the named rank failed; ``except SaveFailed`` catches a failed save on every rank."""


class RanksDisagree(TrainfoldError):
    """The ranks computed different plans, or see different checkpoints."""


def _reasons(count: int) -> str:
    return "1 reason" if count == 1 else f"{count} reasons"

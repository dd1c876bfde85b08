"""Every error of trainfold: what it concerns, what was expected, what was found and the next move."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol, final

import attrs

from trainfold.core.printable import printable


class Refused(Protocol):
    """What a `ResumeRefused` carries: a `Refusal`. Its class is not imported here, because every module imports the errors."""

    @property
    def reasons(self) -> Sequence[Any]:
        """Each reason as a value: drifts, and `Problem`."""

    @property
    def finds_nothing(self) -> bool:
        """Whether the run holds no checkpoint at all."""

    @property
    def listed(self) -> str:
        """Every reason, a line each."""

    @property
    def fix(self) -> str:
        """The next move."""


class TrainfoldError(Exception):
    """The base of all errors here; its fields are for programs, its text is for people.

    Args:
        where: what it concerns: a leaf path, a file, a run, an argument.
        expected: what was promised or asked for.
        found: what is there instead.
        fix: the next move, in words.

    Attributes:
        step: the optimizer step of the save or the checkpoint that it concerns; None where it concerns none (R09).
        rank: the rank that failed, where there are several; None where there is one, or all failed alike.

    Examples:
        >>> print(InvalidState("state.trainer.step", expected=">= 0", found=-1, fix="start at step 0"))
        state.trainer.step: expected >= 0, found -1; start at step 0
    """

    exit_code: ClassVar[int] = 1
    step: int | None = None
    rank: int | None = None
    has_lines: ClassVar[bool] = False  # whether its text lists something; elsewhere a line break comes from a value

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
    """Say at which step and on which rank an error happened, in its fields and in a note; what it knows already stays.

    Args:
        error: any error; one that is not trainfold's gets the note alone.
        step: of the save or the checkpoint; None where nobody knows.
        rank: the rank that failed; None where there is one.

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


def _reasons(count: int) -> str:
    return "1 reason" if count == 1 else f"{count} reasons"


def error_text(error: BaseException) -> str:
    """What an error says, also of one that cannot say it.

    Examples:
        >>> error_text(ValueError("too long"))
        'ValueError: too long'
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 its own text failed
        return type(error).__name__


# --- values that cannot be -------------------------------------------------------------------------------------------


class InvalidState(TrainfoldError):
    """A state, or a part of one, breaks a rule of its own."""


class InvalidArgument(TrainfoldError, ValueError):
    """An argument has a value that can never work; raised before anything is touched."""


class InvalidBatch(InvalidArgument):
    """A batch is empty, ragged in dimension 0, or has fewer samples than microbatches."""


class BatchNotDivisible(InvalidArgument):
    """A number of samples or tokens does not divide into the microbatches asked for (A12)."""


class IncompleteWindow(TrainfoldError):
    """The stream ended inside an accumulation window, and the policy is to raise (A07)."""


class InvalidSchedule(InvalidArgument):
    """A schedule's arguments contradict each other, such as a decay of zero steps that is not disabled."""


class HorizonUnknown(InvalidArgument):
    """Nothing says how long the run is: no total, no maximum of steps, no length of the data (A13)."""


class ScheduleMismatch(TrainfoldError):
    """The schedule that the step was made with is not the one that the state was trained with (A13)."""


class ContractMismatch(TrainfoldError):
    """A step differs from the one that trained the state in something that a resume must keep (V08)."""


class UnknownComponent(InvalidArgument):
    """A component name that no state has; the known names are listed (B02)."""


class UnsupportedLeaf(TrainfoldError, TypeError):
    """A leaf of a type that the format cannot hold without pickle (U01)."""


class UnsupportedOptimizer(InvalidArgument):
    """An optimizer that cannot be a pure function of gradients, such as one that needs a closure."""


class DataPositionMismatch(TrainfoldError):
    """A data position that the dataset or the loader at hand cannot take: another length, batch size or kind (G02)."""


class UnattachedOptimizer(InvalidState):
    """An optimizer that is not attached steps parameters of a live run; a resume would begin it anew (W13)."""


class HiddenStateRefused(InvalidState):
    """State that changes with training and that no component saves, in a run that was attached with ``strict=True`` (W07)."""

    has_lines = True


class SwappedWeights(InvalidState):
    """The averaged weights of an attached object stand in the model, so a save would lose the raw ones (B13)."""


class HiddenState(UserWarning):
    """State that changes with training and that no component saves; a resume would begin it anew (W07)."""


class OptionalLeftOut(UserWarning):
    """An optional component that cannot be saved or restored is left out, and everything else is not (B07)."""


class MastersRebuilt(UserWarning):
    """An optimizer state without its fp32 masters; they were cloned anew from low-precision parameters (B08)."""


# --- donation --------------------------------------------------------------------------------------------------------


class StateDonated(TrainfoldError):
    """A leaf of a state that a donating step has consumed; the new state has its storage."""


class SharedStorage(TrainfoldError):
    """Two leaves of a state to be donated share storage, so that an update of one would change the other."""


class NonFinite(TrainfoldError, ArithmeticError):
    """The loss or the gradient norm is not finite; nothing was updated (A09).

    Attributes:
        skipped: the state with this batch's samples counted, in ``trainer`` and where ``dataset`` is a `DataCursor` there
            too, and nothing else changed: go on from it to skip the batch. Any other position in the data is the
            caller's to advance.
    """

    skipped: object = None


# --- trees that differ -----------------------------------------------------------------------------------------------


class SpecMismatch(TrainfoldError):
    """Two trees differ; all the differences are listed at once.

    Attributes:
        differences: every one of them, in tree order.
    """

    has_lines = True

    def __init__(self, where: str, differences: Sequence[object]) -> None:
        shown = "\n".join(f"  {printable(str(difference))}" for difference in differences)
        super().__init__(
            where,
            expected="the same leaves, shapes and dtypes",
            found=f"{len(differences)} differences:\n{shown}\n",
            fix="build the state as it was built when it was saved",
        )
        self.differences = differences

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.where, self.differences), self._placed())


class RestoreRefused(TrainfoldError):
    """A live run cannot take a state; every reason is listed, and nothing was changed (V12).

    Attributes:
        reasons: one error for each.
    """

    has_lines = True

    def __init__(self, where: str, reasons: "tuple[TrainfoldError, ...]") -> None:
        shown = "\n".join(f"  {type(reason).__name__}: {reason}" for reason in reasons)
        super().__init__(
            where,
            expected="a state that these objects can take",
            found=f"{_reasons(len(reasons))} against it:\n{shown}\n",
            fix="do as each reason says; nothing was changed",
        )
        self.reasons = reasons

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.where, self.reasons), self._placed())


class CaptureRefused(TrainfoldError):
    """A live run that cannot be saved as it is; every reason is listed (W14).

    Attributes:
        reasons: one error for each.
    """

    has_lines = True

    def __init__(self, where: str, reasons: tuple[TrainfoldError, ...]) -> None:
        shown = "\n".join(f"  {type(reason).__name__}: {reason}" for reason in reasons)
        super().__init__(
            where,
            expected="a run that can be saved",
            found=f"{len(reasons)} reasons why every save would fail:\n{shown}\n",
            fix="change what they name now, and not after the steps up to the first save; what need not be saved is left out "
            "with CheckpointManager(components=[...]), where manager.restore(live) comes before the loop",
        )
        self.reasons = reasons

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.where, self.reasons), self._placed())


# --- checkpoints that cannot be used ---------------------------------------------------------------------------------


class CheckpointError(TrainfoldError):
    """The base of everything that can be wrong with a checkpoint or a run on a store."""

    exit_code = 10


class CheckpointMissing(CheckpointError):
    """There is no such run, or no such step in it."""

    exit_code = 11


class RunEmpty(CheckpointMissing):
    """The run is there and holds no complete checkpoint."""

    exit_code = 12


class CheckpointTorn(CheckpointError):
    """Files of a checkpoint are missing or have another size than the manifest says."""

    exit_code = 13


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint are not the ones that were written: a digest differs."""

    exit_code = 14


class CheckpointUnreadable(CheckpointDamaged):
    """The device failed in reading a checkpoint; the bytes on it may be whole, so this alone proves nothing against them."""


class CheckpointForeign(CheckpointError):
    """A directory or file that trainfold did not write, or that belongs to another run."""

    exit_code = 15


class FutureVersion(CheckpointError):
    """A checkpoint written by a newer trainfold, in a schema that this one does not know."""

    exit_code = 16


class CheckpointHostile(CheckpointError):
    """Contents that no trainfold writes and that could harm a reader: escapes, links, overlaps, absurd sizes (U04, U05)."""

    exit_code = 17


class CheckpointQuarantined(CheckpointError):
    """A checkpoint that was found damaged, or in whose loading the process died too often: it is passed over (P07)."""

    exit_code = 18


class RunDamaged(CheckpointError):
    """The run had a whole checkpoint and has none any more, as a copy that was broken off; it is no new run (W21)."""

    exit_code = 19


class ResumeRefused(CheckpointError):
    """A plan to resume was refused; every reason is listed.

    Attributes:
        refusal: the `Refusal`, with each reason as a value.
    """

    exit_code = 20
    has_lines = True

    def __init__(self, where: str, refusal: Refused) -> None:
        super().__init__(
            where,
            expected="a checkpoint that continues this run exactly",
            found=f"{_reasons(len(refusal.reasons))} against it:\n{refusal.listed}\n",
            fix=refusal.fix,
        )
        self.refusal = refusal

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.where, self.refusal), self._placed())


# --- managers named by a path ----------------------------------------------------------------------------------------


class ManagerUnusable(TrainfoldError):
    """The base of everything that can be wrong with a checkpoint manager that a config names (O02, U03)."""


class ManagerPathInvalid(ManagerUnusable):
    """The path of a manager is none: ``package.module.Class`` is one."""


class ManagerNotAllowed(ManagerUnusable):
    """The path of a manager begins with no prefix of the allow-list; nothing was imported."""


class ManagerNotImportable(ManagerUnusable):
    """The module of a manager cannot be imported; the cause says why."""


class ManagerNotFound(ManagerUnusable):
    """The module of a manager has no such class."""


class ManagerIncomplete(ManagerUnusable):
    """What a path names is no class with all the methods of `CheckpointManagerLike`; every one that is missing is listed."""


class ManagerSignatureMismatch(ManagerUnusable):
    """Methods of a manager cannot be called as trainfold calls them; every one is listed."""


class ManagerNotBuilt(ManagerUnusable):
    """The class of a manager raised when it was given the config; the cause says what."""


# --- saves that fail -------------------------------------------------------------------------------------------------


class SaveFailed(CheckpointError):
    """A save did not become a checkpoint; the earlier ones are untouched."""

    exit_code = 30


class NoSpace(SaveFailed):
    """The filesystem has not enough room for the planned bytes; nothing was written."""

    exit_code = 31


class NotWritable(SaveFailed):
    """The run's directory cannot be written."""

    exit_code = 32


class RunLocked(SaveFailed):
    """Another process is saving into this run."""

    exit_code = 33


class CommitConflict(SaveFailed):
    """Somebody else committed this name in the meantime."""

    exit_code = 34


class RunReplaced(SaveFailed):
    """The directory that this process saves into was removed, moved or replaced by another one."""

    exit_code = 35


class RunNotRestored(SaveFailed):
    """The run has checkpoints, and what is to be saved comes from none of them: a restore was forgotten (W10)."""

    exit_code = 37


# --- worlds ----------------------------------------------------------------------------------------------------------


class RankFailed(TrainfoldError):
    """A rank failed, and so every rank raises this, naming it (C07)."""

    has_lines = True  # those of the other rank's error


class SaveFailedElsewhere(SaveFailed, RankFailed):
    """A save failed because another rank did, which it names: ``except SaveFailed`` sees a failed save on every rank (C07)."""

    exit_code = 36
    has_lines = True


class RanksDisagree(TrainfoldError):
    """Ranks computed different plans or see different checkpoints (V05)."""


LISTING: Final = frozenset(
    error.__name__
    for error in (
        SpecMismatch,
        RestoreRefused,
        CaptureRefused,
        ResumeRefused,
        HiddenStateRefused,
        RankFailed,
        SaveFailedElsewhere,
    )
)


@final
@attrs.frozen
class Problem:
    """Why something cannot be used: the name of the error and its four parts."""

    error: str
    where: str
    expected: str
    found: str
    fix: str
    exit_code: int = attrs.field(default=1, eq=False)

    def __str__(self) -> str:
        text = f"{self.error}: {self.where}: expected {self.expected}, found {self.found}; {self.fix}"
        return printable(text, keep="\n" if self.error in LISTING else "")


def problem_of(error: TrainfoldError) -> Problem:
    """The problem that an error describes.

    Examples:
        >>> from trainfold.core.errors import CheckpointTorn
        >>> print(problem_of(CheckpointTorn("step-7", expected="a manifest", found="none", fix="use an older one")))
        CheckpointTorn: step-7: expected a manifest, found none; use an older one
    """
    name = type(error).__name__
    return Problem(name, error.where, str(error.expected), str(error.found), error.fix, type(error).exit_code)

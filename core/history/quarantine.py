"""`Attempts`: the failed attempts to load each checkpoint, so that no run restarts forever on the same bad one.

An attempt is recorded before a checkpoint is loaded and removed after it. A record that stays is a process that died while loading. A
checkpoint whose loads die too often, or whose bytes are proved wrong, is quarantined: a load passes over it with a warning and never
deletes it. A record belongs to one manifest, so a step that is saved again is free.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.checks import count
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointHostile,
    CheckpointQuarantined,
    CheckpointTorn,
    CheckpointUnreadable,
    RankFailed,
    TrainfoldError,
    error_text,
)
from trainfold.core.history.inventory import Inventory
from trainfold.core.problem import Problem, problem_of

LIMIT: Final = 3
MAX_RECORDS: Final = 64
MAX_REASONS: Final = 3
_REASON_CHARACTERS: Final = 1000  # a path, both digests, and what to do
_PROOFS: Final = (CheckpointDamaged, CheckpointTorn, CheckpointHostile)

Ending: TypeAlias = Literal["loaded", "interrupted", "failed", "damaged"]
_WORST: Final[tuple[Ending, ...]] = ("loaded", "interrupted", "failed", "damaged")


@final
@attrs.frozen
class LoadOutcome:
    """How an attempt to load ended.

    Attributes:
        ending: ``loaded``; ``interrupted``: by a user, by a refusal for another reason than the checkpoint, or because the store does not
            give it now; ``failed``: for a reason that may lie in the checkpoint or in the machine, which counts like a death; ``damaged``:
            its bytes are proved wrong, and once is enough.
        reason: what happened, in words.
    """

    ending: Ending
    reason: str = ""


@final
@attrs.frozen
class Tried:
    """The attempts to load one checkpoint.

    Attributes:
        checkpoint: its name, ``step-00000120``.
        digest: the digest of its manifest when it was tried.
        attempts: how many attempts started and did not end well.
        is_damaged: whether its bytes are proved wrong.
        reasons: the messages of failures, oldest first; a death leaves none.
    """

    checkpoint: str
    digest: str
    attempts: int = 0
    is_damaged: bool = False
    reasons: tuple[str, ...] = ()


@final
@attrs.frozen
class Attempts:
    """The attempts in a run: one `Tried` for each checkpoint, sorted by name."""

    records: tuple[Tried, ...] = ()

    def of(self, checkpoint: str, digest: str) -> Tried:
        """The attempts at a checkpoint with this manifest; none if another manifest of that name was tried."""
        found = (each for each in self.records if (each.checkpoint, each.digest) == (checkpoint, digest))
        return next(found, Tried(checkpoint, digest))


def outcome_of(error: BaseException | None) -> LoadOutcome:
    """How an attempt ended, from the error raised in it; None if it did not raise.

    A rank that gives no sign any more may have died of the checkpoint, as a single process that dies while it loads.

    Examples:
        >>> outcome_of(CheckpointTorn("step-7/a", expected="9 bytes", found="8", fix="")).ending
        'damaged'
        >>> outcome_of(KeyError("x")).ending, outcome_of(KeyboardInterrupt()).ending, outcome_of(None).ending
        ('failed', 'interrupted', 'loaded')
    """
    if error is None:
        return LoadOutcome("loaded")
    reason = error_text(error)
    if isinstance(error, _PROOFS) and not isinstance(error, CheckpointUnreadable):
        return LoadOutcome("damaged", reason)
    is_death = isinstance(error, RankFailed) and error.is_silent
    explained = isinstance(error, TrainfoldError) and not is_death
    return LoadOutcome("interrupted" if explained or not isinstance(error, Exception) else "failed", reason)


def worst_outcome(outcomes: Iterable[LoadOutcome]) -> LoadOutcome:
    """How an attempt of several ranks ended: the worst outcome, or the first of equally bad ones.

    Examples:
        >>> worst_outcome([LoadOutcome("loaded"), LoadOutcome("damaged", "a digest"), LoadOutcome("damaged", "another")])
        LoadOutcome(ending='damaged', reason='a digest')
    """
    return max(outcomes, key=lambda outcome: _WORST.index(outcome.ending), default=LoadOutcome("loaded"))


def after_attempt(attempts: Attempts, checkpoint: str, digest: str) -> Attempts:
    """The attempts with one more started. The caller makes this durable before it loads.

    Args:
        attempts: the attempts so far.
        checkpoint: the name of the checkpoint to load.
        digest: the digest of its manifest; if it differs from the recorded one, the count restarts.

    Examples:
        >>> once = after_attempt(Attempts(), "step-00000120", "xxh3:00")
        >>> after_attempt(once, "step-00000120", "xxh3:00").records[0].attempts
        2
        >>> after_attempt(once, "step-00000120", "xxh3:11").records[0].attempts
        1
    """
    known = attempts.of(checkpoint, digest)
    return _with(attempts, attrs.evolve(known, attempts=known.attempts + 1))


def after_success(attempts: Attempts, checkpoint: str) -> Attempts:
    """The attempts after a checkpoint has loaded: its record is gone.

    Examples:
        >>> after_success(after_attempt(Attempts(), "step-00000120", "xxh3:00"), "step-00000120")
        Attempts(records=())
    """
    return Attempts(tuple(each for each in attempts.records if each.checkpoint != checkpoint))


def after_outcome(attempts: Attempts, checkpoint: str, digest: str, outcome: LoadOutcome) -> Attempts:
    """The attempts after one of them has ended.

    Examples:
        >>> begun = after_attempt(Attempts(), "step-00000120", "xxh3:00")
        >>> after_outcome(begun, "step-00000120", "xxh3:00", LoadOutcome("interrupted"))
        Attempts(records=())
        >>> is_quarantined(after_outcome(begun, "step-00000120", "xxh3:00", LoadOutcome("damaged", "a digest")).records[0])
        True
    """
    if outcome.ending == "loaded":
        return after_success(attempts, checkpoint)
    known = attempts.of(checkpoint, digest)
    if outcome.ending == "interrupted":
        return _with(attempts, attrs.evolve(known, attempts=max(int(known.is_damaged), known.attempts - 1)))
    text = outcome.reason.encode("ascii", "backslashreplace").decode()
    text = text if len(text) <= _REASON_CHARACTERS else f"{text[: _REASON_CHARACTERS - 3]}..."
    reasons = (*(reason for reason in known.reasons if reason != text), text)[-MAX_REASONS:]
    is_damaged = known.is_damaged or outcome.ending == "damaged"
    attempts_made = max(1, known.attempts)  # its start may not have been recorded, as on a full disk
    return _with(attempts, attrs.evolve(known, attempts=attempts_made, is_damaged=is_damaged, reasons=reasons))


def only_present(attempts: Attempts, names: Collection[str]) -> Attempts:
    """The attempts without those at checkpoints that were deleted.

    Examples:
        >>> only_present(after_attempt(Attempts(), "step-00000120", "xxh3:00"), ["step-00000130"])
        Attempts(records=())
    """
    return Attempts(tuple(each for each in attempts.records if each.checkpoint in names))


def is_quarantined(tried: Tried, *, limit: int = LIMIT) -> bool:
    """Whether a checkpoint is passed over.

    Args:
        tried: the attempts to load it.
        limit: how many deaths are enough, >= 1.

    Examples:
        >>> is_quarantined(Tried("step-7", "d", attempts=2)), is_quarantined(Tried("step-7", "d", attempts=3))
        (False, True)
    """
    return tried.is_damaged or tried.attempts >= limit


def quarantine_problem(tried: Tried, run: str) -> Problem:
    """The problem of a quarantined checkpoint, for a plan."""
    times = "once" if tried.attempts == 1 else f"{tried.attempts} times"
    found = f"wrong bytes, tried {times}" if tried.is_damaged else f"tried {times}, and it did not load"
    step = int(tried.checkpoint.removeprefix("step-"))
    error = CheckpointQuarantined(
        f"{run}/{tried.checkpoint}",
        expected="a checkpoint that loads",
        found=f"{found} ({'; '.join(tried.reasons) or 'the process died while loading'})",
        fix=f"ask for it with step={step} (on the command line: --step {step}) to try it again: it is free once it has loaded",
    )
    return problem_of(error)


def quarantine_problems(records: Iterable[Tried], digests: Mapping[str, str | None], run: str) -> dict[str, Problem]:
    """The problem of each quarantined checkpoint. One whose step was saved again since has another manifest, and is free.

    Args:
        records: those that are quarantined.
        digests: checkpoint -> the digest of its manifest now; None if it has none.
        run: its location.

    Examples:
        >>> tried = [Tried("step-00000007", "old", 3), Tried("step-00000008", "old", 3)]
        >>> list(quarantine_problems(tried, {"step-00000007": "old", "step-00000008": "new"}, "runs/a"))
        ['step-00000007']
    """
    same = (record for record in records if digests[record.checkpoint] == record.digest)
    return {record.checkpoint: quarantine_problem(record, run) for record in same}


def with_quarantined(inventory: Inventory, problems: Mapping[str, Problem]) -> Inventory:
    """The inventory with a problem for each quarantined checkpoint, which is then neither loaded nor counted as kept.

    Args:
        inventory: what a run holds.
        problems: name -> its `quarantine_problem`.

    Examples:
        >>> from trainfold.core.history.inventory import Entry
        >>> from trainfold.core.format.manifest import Head
        >>> found = Inventory("runs/a", "r", (Entry("step-00000007", Head("r", 7)),))
        >>> with_quarantined(found, {"step-00000007": quarantine_problem(Tried("step-00000007", "d", 3), "runs/a")})\
.entries[0].is_candidate
        False
    """
    for name, problem in problems.items():
        entry = inventory.entry(name)
        if entry is not None and entry.problem is None:  # a problem that it has now is more exact
            inventory = inventory.with_entry(attrs.evolve(entry, problem=problem))
    return inventory


def check_limit(limit: int) -> int:
    """Return a checked limit.

    Raises:
        InvalidArgument: unless it is an int >= 1.

    Examples:
        >>> check_limit(3)
        3
    """
    return count("limit", limit, fix="count the deaths in loading that are enough")


def _with(attempts: Attempts, tried: Tried) -> Attempts:
    others = [each for each in attempts.records if each.checkpoint != tried.checkpoint]
    known = [tried] if tried.attempts else []
    return Attempts(tuple(sorted([*others, *known], key=lambda each: each.checkpoint))[-MAX_RECORDS:])

"""`Conclusion`: the result of comparing three runs of a program: whole, whole again, and killed and resumed."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import attrs

from trainfold.core.rehearsal.reasons import OTHER_BATCH, likely_reasons
from trainfold.core.rehearsal.resized import of_counts
from trainfold.core.rehearsal.trajectory import (
    Again,
    RunDifference,
    Stretch,
    compared,
    computed_again,
    differences,
    restless_parts,
)

RehearsalOutcome: TypeAlias = Literal["identical", "samples", "differs", "within", "beyond", "unrepeatable", "nothing"]
"""``identical``: every bit compared is the same. ``samples``: on another number of ranks, the counts and the position in the data are the
same, and other bits are not, since sums are rounded otherwise. ``differs``: the program repeats itself, and continued differently after a resume.
``within``, ``beyond``: the program does not repeat itself; the values that it computed again after a resume are within the tolerance, or
not. ``unrepeatable``: the program does not repeat itself, and no tolerance was given, or there was no value to compare. ``nothing``: no
checkpoint of a resumed process could be compared. On another number of ranks ``within`` and ``beyond`` are about the values of the whole run."""


@final
@attrs.frozen
class Conclusion:
    """What a rehearsal has found.

    Attributes:
        outcome: the result in a word.
        noise: what differs between runs that were not killed; empty for a program that repeats itself.
        found: what differs between the whole run and the killed one, if the program repeats itself.
        again: values computed again after each resume, if it does not; on other numbers of ranks, the values of resumed processes beside the whole run's.
        checkpoints: how many checkpoints of resumed processes were compared.
        values: how many recorded values of resumed processes were compared.
        reasons: the probable reasons for the difference, the likeliest first.
        unseeded: random streams that the program does not seed; they were not compared.
        restless: recorded values that do not repeat and that no component depends on, such as a time; they were not compared.
    """

    outcome: RehearsalOutcome
    noise: tuple[RunDifference, ...]
    found: tuple[RunDifference, ...]
    again: tuple[Again, ...]
    checkpoints: int
    values: int
    reasons: tuple[str, ...]
    unseeded: tuple[str, ...] = ()
    restless: tuple[str, ...] = ()


def conclude(
    whole: Stretch, again: Stretch, killed: Sequence[Stretch], *, tolerance: float | None, is_resized: bool = False
) -> Conclusion:
    """Compare the runs.

    Law: if the three runs have the same values and the same checkpoints, the outcome is ``identical``. If the two whole
    runs are the same and any value or leaf of a resumed process differs, it is ``differs``.

    Args:
        whole: a run that was not killed.
        again: a second such run.
        killed: the processes of a run that was killed and resumed, in order.
        tolerance: how far apart values may be after a resume of a program that does not repeat itself, relative to the
            larger one; None if none was given.
        is_resized: whether some of the processes ran on another number of ranks. Then only a difference in the counts or the position
            in the data is a wrong resume, and values may be as far from those of the whole run as the tolerance says.

    Examples:
        >>> from trainfold.core.rehearsal.trajectory import SavedStep
        >>> def ran(number, resumed_at, loss):
        ...     values = {step: {"loss": (str(loss),)} for step in range(resumed_at + 1, 5)}
        ...     saved = {("run", 4): SavedStep({"model": f"xxh3:{loss}"}, {})}
        ...     return Stretch(number, resumed_at, resumed_at > 0, False, 4, values, saved)
        >>> conclude(ran(1, 0, 7), ran(1, 0, 7), [ran(1, 0, 7), ran(2, 2, 7)], tolerance=None).outcome
        'identical'
        >>> conclude(ran(1, 0, 7), ran(1, 0, 7), [ran(1, 0, 7), ran(2, 2, 8)], tolerance=None).found[0].step
        3
        >>> conclude(ran(1, 0, 7), ran(1, 0, 8), [ran(1, 0, 7), ran(2, 2, 8)], tolerance=0.2).outcome
        'within'
        >>> conclude(ran(1, 0, 7), ran(1, 0, 7), [ran(1, 0, 7), ran(2, 2, 8)], tolerance=None, is_resized=True).outcome
        'samples'
    """
    resumed = [stretch for stretch in killed if stretch.is_resumed]
    fresh = [stretch for stretch in killed if not stretch.is_resumed]
    apart = [differences(whole, run) for run in (again, *fresh)]
    restless = restless_parts([each for found in apart for each in found])
    if restless is None:
        noise = next(found for found in apart if restless_parts(found) is None)
        pairs = computed_again(killed)
        outcome: RehearsalOutcome = "unrepeatable"
        if tolerance is not None and pairs:
            outcome = "within" if all(pair.apart <= tolerance for pair in pairs) else "beyond"
        return Conclusion(outcome, noise, (), pairs, 0, len(pairs), ())
    found = tuple(each for stretch in resumed for each in differences(whole, stretch, leaving_out=restless))
    counts = [compared(whole, stretch, leaving_out=restless) for stretch in resumed]
    checkpoints, values = sum(count for count, _ in counts), sum(count for _, count in counts)
    outcome = "differs" if found else "identical" if checkpoints else "nothing"
    pairs = ()
    if is_resized and found:
        found = of_counts(found)
        pairs = tuple(pair for stretch in resumed for pair in computed_again([whole, stretch]))
        pairs = tuple(pair for pair in pairs if pair.name not in restless.values)
        outcome = "differs" if found else "samples" if checkpoints else "nothing"
        if outcome == "samples" and tolerance is not None and pairs:
            outcome = "within" if all(pair.apart <= tolerance for pair in pairs) else "beyond"
    first = [each for each in found if each.number == found[0].number]
    names = {name for saved in whole.saved.values() for name in saved.components}
    reasons = (*((OTHER_BATCH,) if is_resized and found else ()), *likely_reasons(first, names))
    unseeded, left_out = tuple(sorted(set(restless.streams.values()))), tuple(sorted(restless.values))
    return Conclusion(outcome, (), found, pairs, checkpoints, values, reasons, unseeded, left_out)

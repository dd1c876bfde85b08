"""The result of a rehearsal, as tables and as an error."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import attrs

from trainfold.adapters.cli.rehearse.errors import NeverResumed, NeverSaved, NotRepeatable, ProgramFailed, ResumeDiffers
from trainfold.adapters.cli.rehearse.kept import MeasuredDifference
from trainfold.adapters.cli.rehearse.options import RehearsalSettings
from trainfold.adapters.cli.rehearse.starts import Start
from trainfold.adapters.cli.terminal.output import Table
from trainfold.core.errors import TrainfoldError
from trainfold.core.printable import printable
from trainfold.core.rehearsal.conclusion import Conclusion
from trainfold.core.rehearsal.number import float_of
from trainfold.core.rehearsal.trajectory import RunDifference

_SHOWN_LEAVES: Final = 6
_SHOWN_LINES: Final = 12
_CUT: Final = 60
_ATTACH: Final = "see docs/how-to/rehearse.md"


@final
@attrs.frozen
class Rehearsed:
    """All that was run.

    Attributes:
        settings: of the rehearsal.
        whole: the run that was not killed.
        again: a second such run.
        killed: the processes of the run that was killed.
        conclusion: the result of comparing them; None if the program saved nothing.
        measured: the size of the first difference between components; None without one, or if it could not be measured.
        room: bytes of a checkpoint, of all that are on the disk at once, and of the free space.
        failed: the failure of a program that does not repeat itself and was started again.
        of_ranks: the components that were not compared because they belong to ranks, and starts had different numbers of them.
    """

    settings: RehearsalSettings
    whole: Start
    again: Start | None
    killed: tuple[Start, ...]
    conclusion: Conclusion | None
    measured: MeasuredDifference | None = None
    room: Mapping[str, int] = attrs.field(factory=dict)
    failed: ProgramFailed | None = None
    of_ranks: tuple[str, ...] = ()

    @property
    def has_position(self) -> bool:
        """Whether the position in the data was compared."""
        return any("dataset" in saved.components for saved in self.whole.stretch.saved.values())

    @property
    def kills(self) -> int:
        """How often it was killed."""
        return sum(start.hit is not None for start in self.killed)


def error_of(rehearsed: Rehearsed) -> TrainfoldError | None:
    """Why the rehearsal failed, or None."""
    conclusion = rehearsed.conclusion
    if conclusion is None or not rehearsed.whole.stretch.saved:
        return _never_saved(rehearsed)
    if rehearsed.failed is not None:
        return _fails_since_restless(conclusion, rehearsed.failed)
    not_resumed = [start for start in rehearsed.killed[1:] if not start.stretch.is_resumed]
    was_over = conclusion.outcome == "nothing" and _was_over(rehearsed)
    if not_resumed or rehearsed.kills == 0 or was_over:
        return _never_resumed(not_resumed)
    return _by_outcome(rehearsed.settings, conclusion)


def _by_outcome(settings: RehearsalSettings, conclusion: Conclusion) -> TrainfoldError | None:
    if conclusion.outcome in ("unrepeatable", "beyond"):
        return _not_repeatable(settings, conclusion)
    if conclusion.outcome == "nothing":
        return NeverSaved(
            "the resumed program",
            expected="a checkpoint after the resume, at a step and in a directory where the whole run has one",
            found="none",
            fix="save at each boundary with manager.step(live), or pass --every with a divisor of --steps",
        )
    if conclusion.outcome == "differs":
        return _differs(conclusion)
    return None


def _never_saved(rehearsed: Rehearsed) -> TrainfoldError:
    has_manager = bool(rehearsed.whole.places)
    return NeverSaved(
        "the program",
        expected=f"a checkpoint within {rehearsed.settings.steps} steps",
        found=f"none after {rehearsed.whole.stretch.last_step} steps" if has_manager else "no CheckpointManager and no checkpoint",
        fix="call live.advance() and manager.step(live) after each optimizer step"
        if has_manager
        else "make a CheckpointManager; or, for a program that calls trainfold.save, put {run} into the command where it saves",
    )  # fmt: skip


def _never_resumed(not_resumed: Sequence[Start]) -> TrainfoldError:
    if not_resumed:
        return NeverResumed(
            f"start {not_resumed[0].stretch.number} of the killed run",
            expected="a program that goes on from its newest checkpoint",
            found="one that began at step 0, beside the checkpoints of the one that was killed",
            fix="call manager.restore(live) before the loop, and save into the same place at each start: a directory with a "
            "date in its name is another one each time",
        )
    return NeverResumed(
        "the program",
        expected="a program that is still running after its first save",
        found="one that was over before it could be killed",
        fix="pass more --steps, or a lower --every",
    )


def _was_over(rehearsed: Rehearsed) -> bool:
    """Whether each kill came after the last save, so that no step was left to train."""
    return all(start.stretch.resumed_at >= rehearsed.whole.stretch.last_step for start in rehearsed.killed if start.stretch.is_resumed)  # fmt: skip


def _fails_since_restless(conclusion: Conclusion, failed: ProgramFailed) -> TrainfoldError:
    return NotRepeatable(
        "the program",
        expected="the same bits twice",
        found=f"{_noise(conclusion)}; and {failed.where} failed: {failed.found}",
        fix="make it repeat itself: seed all that it draws from, such as with torch.manual_seed(0) before the model and the data are made",
    )


def _noise(conclusion: Conclusion) -> str:
    return printable(f"two runs that were not killed differ in {_named(conclusion.noise[0])}")


def _not_repeatable(settings: RehearsalSettings, conclusion: Conclusion) -> TrainfoldError:
    worst = max(conclusion.again, key=lambda pair: pair.apart, default=None)
    if settings.is_resized and not conclusion.noise and worst is not None:
        return ResumeDiffers(
            f"start {worst.number} of the killed run",
            expected=f"{worst.name} within {settings.tolerance} of the run that was never killed",
            found=f"{float_of(worst.after)} and not {float_of(worst.before)} in step {worst.step}, {worst.apart:.2g} apart",
            fix=f"rehearse with --nproc {rehearsed_on(settings)[0]} alone, which compares bits; if that finds nothing, record a value of all ranks, "
            "since rank 0 has another share of the batch on another number of ranks, or pass a larger --tolerance",
        )
    noise = _noise(conclusion)
    if conclusion.outcome == "beyond" and worst is not None:
        return ResumeDiffers(
            f"start {worst.number} of the killed run",
            expected=f"{worst.name} within {settings.tolerance} of what the killed process had",
            found=f"{float_of(worst.after)} and not {float_of(worst.before)} in step {worst.step}, {worst.apart:.2g} apart",
            fix=f"{noise}; make the program repeat itself to find what a resume loses",
        )
    if not conclusion.again:
        fix = "make it repeat itself (seeds, torch.use_deterministic_algorithms); or record values with live.record(loss=loss) and name a --tolerance"
        return NotRepeatable("the program", expected="the same bits twice", found=noise, fix=fix)
    assert worst is not None
    return NotRepeatable(
        "the program",
        expected="the same bits twice, or a --tolerance",
        found=f"{noise}; after a resume, {len(conclusion.again)} values computed again are "
        + (
            f"up to {worst.apart:.2g} apart ({printable(worst.name)} of step {worst.step})"
            if worst.apart
            else "all the same"
        ),
        fix="make it repeat itself (seeds, torch.use_deterministic_algorithms), or name what you accept, such as --tolerance 1e-3",
    )


def _differs(conclusion: Conclusion) -> TrainfoldError:
    first = conclusion.found[0]
    components = [each for each in conclusion.found if each.kind == "component" and each.number == first.number]
    where = ""
    if components and first.kind != "component":
        names = ", ".join(each.name for each in components if each.step == components[0].step)
        where = f"; at step {components[0].step} then {names}"
    return ResumeDiffers(
        f"start {first.number} of the killed run, resumed at step {first.resumed_at}",
        expected="the bits of the run that was never killed",
        found=f"a difference in {_named(first)} first{where}",
        fix=conclusion.reasons[0] if conclusion.reasons else _ATTACH,
    )


def _named(difference: RunDifference) -> str:
    if difference.kind == "value":
        return f"{difference.name} of step {difference.step}"
    if difference.kind == "end":
        return f"the {difference.name}, {difference.found} and not {difference.expected},"
    leaf = f" ({difference.leaves[0][0]})" if difference.leaves else ""
    return f"{difference.name}{leaf} at step {difference.step}"


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(rehearsed: Rehearsed, facts: Sequence[tuple[str, str]]) -> tuple[Table, ...]:
    """The tables for people."""
    made = [_history(rehearsed)]
    conclusion = rehearsed.conclusion
    if conclusion is not None:
        made += _noise_table(conclusion)
        made += _difference_tables(conclusion)
        made += _leaf_tables(conclusion, rehearsed.measured)
        if conclusion.again and conclusion.outcome != "samples":
            made.append(_again_table(conclusion))
        if conclusion.reasons:
            made.append(Table("Likely reasons", ("",), tuple((reason,) for reason in conclusion.reasons)))
    return (*made, Table("", ("", ""), tuple(facts)))


def _history(rehearsed: Rehearsed) -> Table:
    whole, conclusion = rehearsed.whole, rehearsed.conclusion
    ended = rehearsed.killed[-1].stretch.last_step if rehearsed.killed else ""
    rows = [("steps", f"{whole.stretch.last_step}", f"{ended}", "")]
    saved = len({step for _, step in whole.stretch.saved})
    if conclusion is not None:
        rows += [
            ("checkpoints", f"{saved}", f"{conclusion.checkpoints} compared", ""),
            ("recorded values", f"{_count(whole)}", f"{conclusion.values} compared{_apart(rehearsed)}", ""),
            ("a second whole run", "NOT the same" if conclusion.noise else "the same bits", "", ""),
            *((f"  stream of {name}", "not seeded: not compared", "", "") for name in conclusion.unseeded),
            *(
                (f"  {name} of each rank", "depends on their number: not compared", "", "")
                for name in rehearsed.of_ranks
            ),
            *((f"  recorded {name}", "does not repeat itself: not compared", "", "") for name in conclusion.restless),
        ]
    rows.append(("kills", "0", f"{rehearsed.kills} of {rehearsed.settings.kills}", ""))
    for start in rehearsed.killed:
        on = f" on {_ranks(rehearsed_on(rehearsed.settings), start)}" if rehearsed.settings.is_resized else ""
        rows.append((f"start {start.stretch.number}", "", f"{start.resumed_from or 'fresh'}{on}", ""))
        rows.append((f"end {start.stretch.number}", "", hit_text(start), ""))
    rows.extend(_fingerprint_rows(rehearsed))
    if conclusion is not None:
        words = {
            "identical": "yes", "differs": "NO", "nothing": "nothing was compared", "unrepeatable": "the program does not repeat itself",
            "samples": f"no, but the same steps{' and samples' if rehearsed.has_position else ''}",
            "within": f"no, but within {rehearsed.settings.tolerance}", "beyond": f"NO, beyond {rehearsed.settings.tolerance}",
        }  # fmt: skip
        rows.append((f"identical: {words[conclusion.outcome]}", "", "", ""))
    return Table(
        "One program, never killed and killed", ("", "never killed", "killed and resumed", "same"), tuple(rows)
    )


def _fingerprint_rows(rehearsed: Rehearsed) -> list[tuple[str, str, str, str]]:
    """The components of the last checkpoint that both runs have."""
    one = rehearsed.whole.stretch.saved
    other = {key: saved for start in rehearsed.killed for key, saved in start.stretch.saved.items()}
    common = sorted(one.keys() & other.keys(), key=lambda key: (key[1], key[0]))
    if not common:
        return []
    last = common[-1]
    found = () if rehearsed.conclusion is None else rehearsed.conclusion.found
    unlike = {each.name for each in found if each.step == last[1]}
    rows = [(f"at step {last[1]}", "", "", "")]
    for name in {**one[last].components, **other[last].components}:
        a, b = one[last].components.get(name, "absent"), other[last].components.get(name, "absent")
        is_masked = rehearsed.conclusion is not None and bool(rehearsed.conclusion.unseeded) and name not in unlike
        rows.append((name, a, b, "yes" if a == b else "yes (seeded streams)" if is_masked else "NO"))
    return rows


def _noise_table(conclusion: Conclusion) -> list[Table]:
    if not conclusion.noise:
        return []
    rows = tuple(_row(each) for each in conclusion.noise[:_SHOWN_LINES])
    return [Table("Two runs that were not killed differ", ("step", "what", "one", "the other"), rows)]


def _difference_tables(conclusion: Conclusion) -> list[Table]:
    if not conclusion.found:
        return []
    first = conclusion.found[0]
    mine = [each for each in conclusion.found if each.number == first.number]
    title = f"What differs, first things first: start {first.number}, resumed at step {first.resumed_at}"
    columns = ("step", "what", "never killed", "killed and resumed")
    return [Table(title, columns, tuple(_row(each) for each in mine[:_SHOWN_LINES]))]


def _leaf_tables(conclusion: Conclusion, measured: MeasuredDifference | None) -> list[Table]:
    """The leaves of the first checkpoint that differs, with how large each difference is."""
    found = conclusion.noise or conclusion.found
    components = [each for each in found if each.kind == "component" and each.number == found[0].number]
    here = [each for each in components if each.step == components[0].step]
    rows = []
    for leaf, expected, got in (leaf for each in here for leaf in each.leaves[:_SHOWN_LEAVES]):
        size = None if measured is None else measured.sizes.get(leaf)
        if size is None:
            rows.append((leaf, "", "", "", _cut(expected), _cut(got)))
        else:
            largest = "not finite" if size.largest is None else f"{size.largest:.3g}"
            count = f"{size.differing} of {size.elements}"
            rows.append((leaf, largest, count, str(list(size.first)), size.expected, size.found))
    if not rows:
        return []
    sides = ("one", "the other") if conclusion.noise else ("never killed", "killed and resumed")
    columns = ("leaf", "largest difference", "elements that differ", "first at", *sides)
    return [Table(f"Leaves of the first checkpoint that differs, step {here[0].step}", columns, tuple(rows))]


def _row(difference: RunDifference) -> tuple[str, str, str, str]:
    return (
        f"{difference.step}",
        difference.name,
        _shown(difference, difference.expected),
        _shown(difference, difference.found),
    )


def _shown(difference: RunDifference, text: str) -> str:
    if difference.kind != "value" or "x" not in text:
        return _cut(text)
    return f"{float_of(text):.6g} ({text})"


def _again_table(conclusion: Conclusion) -> Table:
    worst = sorted(conclusion.again, key=lambda pair: -pair.apart)[:_SHOWN_LINES]
    rows = tuple(
        (f"{pair.step}", f"{pair.number}", pair.name, f"{float_of(pair.before):.6g}", f"{float_of(pair.after):.6g}", f"{pair.apart:.2g}")
        for pair in worst
    )  # fmt: skip
    before = "before the kill" if conclusion.noise else "never killed"
    columns = ("step", "start", "value", before, "after the resume", "apart")
    return Table(
        f"Computed again after a resume: {len(conclusion.again)} values, the furthest apart first", columns, rows
    )


def _apart(rehearsed: Rehearsed) -> str:
    """How far the values of each resumed process on other numbers of ranks are from those of the whole run."""
    conclusion = rehearsed.conclusion
    if conclusion is None or conclusion.noise:
        return ""
    worst: dict[int, float] = {}
    for pair in conclusion.again:
        worst[pair.number] = max(worst.get(pair.number, 0.0), pair.apart)
    each = [f"{apart:.2g} apart in start {number}" for number, apart in worst.items()]
    return f"; up to {', '.join(each)}" if each else ""


def rehearsed_on(settings: RehearsalSettings) -> tuple[int, ...]:
    """How many ranks the starts of a run have, in turn; (1,) if the program starts its own."""
    return settings.nproc or (1,)


def _ranks(nproc: Sequence[int], start: Start) -> str:
    count = nproc[(start.stretch.number - 1) % len(nproc)]
    return "1 rank" if count == 1 else f"{count} ranks"


def _cut(text: str) -> str:
    return text if len(text) <= _CUT else f"{text[: _CUT - 3]}..."


def _count(start: Start) -> int:
    return sum(len(texts) for values in start.stretch.values.values() for texts in values.values())


def hit_text(start: Start) -> str:
    """How a process ended, in words."""
    if start.hit is None:
        return start.ended
    of = "" if start.hit.rank is None else f" of rank {start.hit.rank}"
    if start.hit.during == "save":
        return f"SIGKILL{of} during the save of step {start.hit.step}"
    return f"SIGKILL{of} in step {start.hit.step + 1}"


def further(rehearsed: Rehearsed) -> list[tuple[str, str]]:
    """Pairs of places to compare if the runs differ: the first checkpoints that differ, or else the newest ones."""
    if rehearsed.measured is not None:
        one, other = rehearsed.measured.places
        return [(str(one), str(other))]
    if error_of(rehearsed) is None:
        return []
    return list(zip(rehearsed.whole.places, rehearsed.killed[-1].places, strict=False)) if rehearsed.killed else []


def relative(path: str, to: Path) -> str:
    """A path relative to a directory, if it is below the directory."""
    return str(Path(path).relative_to(to)) if Path(path).is_relative_to(to) else path

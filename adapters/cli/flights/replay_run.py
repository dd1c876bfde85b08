"""`trainfold replay RUN -- CMD`: runs the user's program again from a checkpoint, and compares it with the flight log of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainfold.adapters.cli.diff import diff_checkpoints
from trainfold.adapters.cli.flights.log_checks import log_warnings, replayed_otherwise
from trainfold.adapters.cli.flights.read_run import Logs, ReadRun, read_run
from trainfold.adapters.cli.flights.replayed_steps import replayed_steps
from trainfold.adapters.cli.flights.scratch_run import (
    ReplayRequest,
    ScratchRun,
    check_command,
    check_outside,
    failure_texts,
    replay_program,
    scratch_place,
)
from trainfold.adapters.cli.terminal.output import Answer, Different, Table
from trainfold.core.errors import InvalidArgument
from trainfold.core.flight.causes.known_states import unlike_leaves
from trainfold.core.flight.step_difference import StepDifference, first_step_apart
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.leaf_texts import leaf_texts
from trainfold.core.markup.texts import steps_text

_ALL_FINITE: Final = "no output of a module, with torch.compile off; what it compiles may have other bits"
_PLACE: Final = scratch_place("replay", "replay")


def replay_run(  # noqa: PLR0913 - one for each option
    run: Path,
    command: tuple[str, ...],
    *,
    begin: int | None,
    end: int | None,
    until_nonfinite: bool,
    directory: Path,
    patience_secs: float,
) -> Answer:
    """Run a program again from a checkpoint of its run, in a scratch directory, and compare what it does with the log.

    Args:
        run: the run; it is only read.
        command: the program and its arguments.
        begin: the step of the checkpoint; 0 for the start of the program, None for the newest before ``end``, or before the first loss or norm that is
            not finite, where one is looked for.
        end: the last step; None for the last one of the log.
        until_nonfinite: whether to end at the first module whose output is not finite, and to show it.
        directory: for everything that the replay writes.
        patience_secs: how long the program may be silent.

    Returns:
        The tables; with `Different` if a step, or the state at the end, is not that of the run.

    Raises:
        InvalidArgument: if the steps leave nothing to replay. CheckpointMissing: if there is no such checkpoint.
        ProgramFailed: if the program fails. NeverResumed: if it does not go on from the checkpoint.
    """
    command = check_command(command)
    check_outside(directory, run)
    read = read_run(run)
    begin, end = replayed_steps(read.inventory, read.flights, begin, end, until_nonfinite=until_nonfinite)
    with _PLACE.prepared(directory):
        _PLACE.mark(directory, {"command": list(command), "run": str(run), "from": begin, "to": end})
        request = ReplayRequest(read, begin, end, command, until_nonfinite, patience_secs)
        made = replay_program(directory, request)
    has_ended_as_the_run = until_nonfinite and made.run.last >= read.last
    if made.failure is not None and not has_ended_as_the_run:
        raise made.failure
    if made.nonfinite is not None:
        return _nonfinite(request, made, made.nonfinite)
    return _uncompared(request, made) if begin and begin not in read.saved else _compared(request, made)


def first_of_ranks(
    one: Logs, other: Logs, *, after: int, until: int | None = None
) -> tuple[int, StepDifference] | None:
    """The first difference between the logs of two runs on any rank that both have, with the rank.

    One rank with another batch gives all of them another loss: of several in one step it is that one, which explains the others. Of those with
    another loss or norm alone it is one with another loss, which shows more; that does not prove which rank it was.
    """
    pairs = ((rank, first_step_apart(one[rank], other[rank], after=after, until=until)) for rank in sorted(one.keys() & other.keys()))  # fmt: skip
    found = [(rank, each) for rank, each in pairs if each is not None]
    return min(
        found, key=lambda each: (each[1].step, not each[1].is_of_one_rank, "loss" not in each[1].parts), default=None
    )


def _uncompared(request: ReplayRequest, made: ScratchRun) -> Answer:
    """What is said of a replay from a checkpoint that was left behind, in which all was finite."""
    begin, reached = request.begin, min(made.run.last, request.end)
    warning = f"step {begin} was left behind by the run: what followed it is in no log, and nothing was compared"
    rows = (
        ("replayed", steps_text(begin + 1, reached) if reached > begin else "no step"),
        ("not finite", _ALL_FINITE),
        ("what it said", str(made.output)),
        ("warning", warning),
    )
    table = Table(f"{request.run.where}, and its replay", ("", ""), rows)
    return Answer(_data(request, reached, warnings=[warning]), (table,))


def _nonfinite(request: ReplayRequest, made: ScratchRun, found: Mapping[str, Any]) -> Answer:
    step = "?" if found["step"] is None else str(found["step"])
    step += f", on rank {found['rank']}" if found["rank"] else ""
    lines = [line.strip() for line in found["text"].splitlines()]
    warnings = _start_warnings(request)
    rows = [
        ("in step", step),
        *(("", line) for line in lines),
        ("what it said", str(made.output)),
        *(("warning", text) for text in warnings),
    ]
    shown = {key: found[key] for key in ("step", "text", "output")}
    data = _data(request, None, rank=found["rank"], nonfinite=shown, warnings=warnings)
    return Answer(data, (Table("Not finite", ("", ""), tuple(rows)),))


def _start_warnings(request: ReplayRequest) -> list[str]:
    """What is said of a checkpoint from which a replay went on to look for what is not finite, and that is not finite itself."""
    from trainfold.adapters.cli.formats.leaf_values import first_nonfinite  # late: it imports torch

    begin = request.begin
    path = first_nonfinite(request.run.checkpoint(begin)) if begin else None
    return [] if path is None else [f"the state of step {begin} is not finite itself, as in {path}: what made it so came before, unless it was so from the start; pass an earlier --from"]  # fmt: skip


def _data(request: ReplayRequest, reached: int | None, **found: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "reached": reached,
        "steps": 0,
        "same": None,
        "rank": None,
        "difference": None,
        "states": None,
        "nonfinite": None,
        "warnings": [],
    }
    return {"run": request.run.where, "from": request.begin, "to": request.end, **known, **found}


def difference_data(difference: StepDifference | None) -> dict[str, Any] | None:
    """A difference as JSON can hold it."""
    if difference is None:
        return None
    lists = {name: list(getattr(difference, name)) for name in ("parts", "same", "components")}
    return {"step": difference.step, **lists, "text": str(difference)}


def _is_unseeded(run: ReadRun, made: ReadRun, step: int) -> bool:
    """Whether two states are the same but for streams that programs seldom seed, which begin elsewhere at each start; a checkpoint would put them back."""
    return not unlike_leaves(*(leaf_texts(each.checkpoint(step).manifest) for each in (run, made)))


def _compared(request: ReplayRequest, made: ScratchRun) -> Answer:
    run, begin, end = request.run, request.begin, request.end
    flights, there = run.flights, made.run.flights
    found = first_of_ranks(flights, there, after=begin, until=end)
    steps = (
        sum(begin < step <= end and step in flights[0].steps for step in there[0].steps)
        if 0 in there and 0 in flights
        else 0
    )
    last, reached = run.last, min(made.run.last, end)
    at = min(end, last)
    both = at > begin and at in run.saved and at in made.run.saved
    states = diff_checkpoints(*(each.path / directory_of(at) for each in (run, made.run)), values=True) if both else None  # fmt: skip
    is_short = reached < min(end, last)
    if not steps and states is None and not is_short:
        raise InvalidArgument("RUN", expected=f"a flight log of steps {begin + 1} to {end}, or a checkpoint at step {end}",
                              found=f"a run that ends at step {last}" if last <= begin else "neither",
                              fix="pass --to with a step that has a checkpoint" if last > begin else "pass an earlier --from")  # fmt: skip
    is_state_same = states is None or states.error is None
    state = "the same" if is_state_same else "other bits"
    if not is_state_same and not begin and _is_unseeded(run, made.run, at):
        is_state_same, state = (
            True,
            "the same, but for streams of python or numpy, which the program has not seeded, and on which nothing that is known depends",
        )
    if states is None:
        state = f"not compared: the {'replay' if at in run.saved else 'run'} has no checkpoint there"
    warnings = log_warnings((run, made.run), ("the log of the run", "that of the replay"), after=begin, until=end)  # fmt: skip
    warnings += [*_start_warnings(request), *failure_texts(made, "the run")] if request.until_nonfinite else []
    is_same = found is None and not is_short and is_state_same
    if end > last + request.until_nonfinite:
        warnings.append(f"--to is step {end}, and the run ends at step {last}: nothing after that is compared")
    if not is_same and (elsewhere := replayed_otherwise(run, made.run, "the run", begin, end)):
        warnings.append(elsewhere)
    rank, difference = (None, None) if found is None else found
    shown = "none" if difference is None else f"{difference}{f' (rank {rank})' if rank else ''}"
    rows = [
        ("replayed", steps_text(begin + 1, reached) if reached > begin else "no step"),
        ("compared with the log", f"{steps} steps"),
        ("first difference", shown),
        (f"state at step {at}", state),
        *([("not finite", _ALL_FINITE)] if request.until_nonfinite else []),
        ("what it said", str(made.output)),
        *(("warning", text) for text in warnings),
    ]
    tables = [Table(f"{run.where}, and its replay", ("", ""), tuple(rows))]
    tables += [] if states is None or is_state_same else states.tables
    error = None
    if not is_same:
        error = Different(
            f"the replay of {run.where}",
            expected="what the run did",
            found=shown
            if difference is not None
            else f"a program that ended after step {reached}, where the run goes on to step {last}"
            if is_short
            else f"another state at step {at}, by the same losses and batches",
            fix="start the program with the settings of the run; what it said is in the table"
            if difference is None and is_short
            else "replay again: if that differs too, and from this replay, the program does not repeat itself; else it has changed, or the run had a fault",
        )
    data = _data(request, reached, steps=steps, same=is_same, rank=rank, difference=difference_data(difference), states=None if states is None else states.data, warnings=warnings)  # fmt: skip
    return Answer(data, tuple(tables), error)

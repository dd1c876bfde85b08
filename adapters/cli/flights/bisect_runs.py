"""`trainfold bisect A B`: the first step in which two runs part, and why."""

import shlex
from pathlib import Path
from typing import Any, Final

import attrs

from trainfold.adapters.cli.flights.log_checks import (
    believed,
    ended_apart,
    log_warnings,
    replayed_otherwise,
    uncompared,
    unrecorded_batches,
)
from trainfold.adapters.cli.flights.read_run import ReadRun, read_run
from trainfold.adapters.cli.flights.replay_run import difference_data, first_of_ranks
from trainfold.adapters.cli.flights.run_evidence import evidence_of
from trainfold.adapters.cli.flights.scratch_run import (
    ReplayRequest,
    check_command,
    failure_texts,
    replay_program,
    scratch_place,
    serves_any_run,
)
from trainfold.adapters.cli.terminal.output import Answer, Different, Table
from trainfold.core.errors import InvalidArgument
from trainfold.core.flight.causes.evidence import Evidence
from trainfold.core.flight.causes.known_states import unlike_leaves
from trainfold.core.flight.causes.parting import Parting, parting_of
from trainfold.core.format.leaf_texts import leaf_texts

_B: Final = "b"  # where the replay of B is
_PLACE: Final = scratch_place("bisect", "bisection", _B)
_SEEDED: Final = "they were seeded otherwise, and nothing that is known depends on it"
_SHOWN: Final = 40
_AGAIN: Final = "to know more, put the program after them, as in -- CMD {run}: both runs are run again, which shows a fault of one of them; "


def bisect_runs(  # noqa: PLR0913 - one for each option
    a: Path, b: Path, command: tuple[str, ...], *, command_b: str | None = None, directory: Path, patience_secs: float
) -> Answer:
    """Find where two runs part, and why.

    Args:
        a: one run.
        b: the other; both are only read.
        command: the program of ``a``, to run it again; empty not to. With ``{run}`` in it, ``b`` is run again too.
        command_b: the program of ``b``, as one text; None for the same.
        directory: for what a replay writes.
        patience_secs: how long the program may be silent.

    Returns:
        The first step, the cause and what supports it; with `Different` if they part.

    Raises:
        CheckpointMissing: if one of them is not there. ProgramFailed, NeverResumed: of the replay.
    """
    theirs = _program_of_b(command, command_b)
    command = check_command(command) if command or theirs else command
    read = read_run(a), read_run(b)
    (mine, said), (other, said_too) = believed(read[0], read[1].flights), believed(read[1], read[0].flights)
    runs = mine, other
    parting = parting_of(evidence_of(runs))
    if command and parting.step is not None:
        with _PLACE.prepared(directory):
            _PLACE.mark(directory, {"command": list(command), "command_b": list(theirs), "a": str(a), "b": str(b)})
            evidence, said_of_replays = _replayed(runs, parting, (command, theirs), directory, patience_secs)
        parting = parting_of(evidence)
        said += said_of_replays
    if parting.step is None:
        said += [*uncompared(runs), *ended_apart(runs)]
        said += [_SEEDED] if parting.evidence.seeds else []
    else:
        said += [*_apart_beside(parting.evidence), *unrecorded_batches(runs, parting.step)]
    return _answer((mine.where, other.where), parting, [*said, *said_too, *log_warnings(runs, ("A", "B"))])


def _apart_beside(known: Evidence) -> list[str]:
    """What is said of two runs that part, beside the cause."""
    said = []
    if known.workers is not None:
        said.append("the loader of A has {} workers, and that of B has {}: random numbers that a dataset draws are others then".format(*known.workers))  # fmt: skip
    if known.unsaved:
        said.append(f"no checkpoint has {', '.join(known.unsaved)}, so that a resume resets it: a run that was resumed may differ by that alone")  # fmt: skip
    return said


def _program_of_b(command: tuple[str, ...], given: str | None) -> tuple[str, ...]:
    """The program of B; empty if it is not run again."""
    if given is None:
        return command if serves_any_run(command) else ()
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise InvalidArgument("--program-b", expected="a command, quoted as in a shell", found=f"{given!r}: {error}",
                              fix="close the quotes, as in --program-b 'python other.py'") from error  # fmt: skip
    return check_command(words)


def _replayed(
    runs: tuple[ReadRun, ReadRun],
    parting: Parting,
    commands: tuple[tuple[str, ...], tuple[str, ...]],
    directory: Path,
    patience_secs: float,
) -> tuple[Evidence, list[str]]:
    """The evidence, with what the programs do again from the last state that both have; and in what the replays were not like the runs."""
    known, end = parting.evidence, parting.step
    assert end is not None
    begin = known.same_at if known.same_at is not None and known.same_at < end else 0
    a, b = runs
    made = replay_program(directory, ReplayRequest(a, begin, end, commands[0], patience_secs=patience_secs))
    said, failed = [replayed_otherwise(a, made.run, "A", begin, end)], failure_texts(made, "A")
    repeats = _repeated(a, made.run, begin, end), _repeated(b, made.run, begin, end)
    own_of_b = reached_by_b = None
    if commands[1]:
        other = replay_program(directory / _B, ReplayRequest(b, begin, end, commands[1], patience_secs=patience_secs))
        said.append(replayed_otherwise(b, other.run, "B", begin, end))
        failed += failure_texts(other, "B")
        own_of_b, reached_by_b = _repeated(b, other.run, begin, end), other.run.last
    known = attrs.evolve(
        known,
        repeats=repeats,
        own=(repeats[0], own_of_b),
        reached=(made.run.last, reached_by_b),
        elsewhere=(said[0] != "", said[-1] != "" and len(said) > 1),
        is_one_program=commands[0] == commands[1],
    )
    return known, [*(text for text in said if text), *failed]


def _repeated(run: ReadRun, made: ReadRun, begin: int, end: int) -> bool | None:
    """Whether a program did again what a run has; None if the last step is in neither their logs nor their checkpoints, as of a program that ended before it."""
    logs = run.flights, made.flights
    if first_of_ranks(*logs, after=begin, until=end) is not None:
        return False
    if end in run.saved and end in made.saved:
        return not unlike_leaves(*(leaf_texts(each.checkpoint(end).manifest) for each in (run, made)))
    ranks = run.flights.keys() & made.flights.keys()
    return True if ranks and all(end in each[rank].steps for each in logs for rank in ranks) else None


def _repeat_rows(parting: Parting) -> list[tuple[str, str]]:
    """Which program did again what which run has, as rows of a table."""
    known = parting.evidence
    of_a, of_b = known.reached
    away_a, away_b = known.elsewhere
    asked = [
        (*"AA", known.repeats[0], of_a, "put the program of A after --", away_a),
        (*"AB", known.repeats[1], of_a, "put the program of A after --", False),
    ]
    asked += [] if of_a is None else [(*"BB", known.own[1], of_b, "put {run} into the command, or name its program with --program-b", away_b)]  # fmt: skip
    rows = []
    for program, run, repeats, reached, untried, is_away in asked:
        if repeats is not None:
            text = "yes" if repeats else f"NO{', which says nothing: see the warning' if is_away else ''}"
        elif reached is None:
            text = f"not tried: {untried}"
        elif reached < (parting.step or 0):
            text = f"not known: it ended after step {reached}, before that step"
        else:
            text = "not known: no log and no checkpoint of that step is there to compare"
        rows.append((f"the program of {program} repeats {run}", text))
    return rows


def _next_move(parting: Parting) -> str:
    """What would show more of why two runs part, with a semicolon after it; empty if nothing would."""
    known, step = parting.evidence, parting.step or 0
    short = [name for name, reached in zip("AB", known.reached, strict=True) if reached is not None and reached < step]
    if short:
        return f"to know more, let the program of {' and that of '.join(short)} run until step {step}; "
    return _AGAIN if parting.may_be and None in known.own else ""


def _answer(names: tuple[str, str], parting: Parting, warnings: list[str]) -> Answer:
    known = parting.evidence
    facts = [
        ("they", str(parting)),
        ("in the logs", "no difference" if known.difference is None else str(known.difference)),
        ("same state at", "no step that both have saved" if known.same_at is None else f"step {known.same_at}"),
        ("other state at", "no step that both have saved" if known.apart_at is None else f"step {known.apart_at}"),
        *_repeat_rows(parting),
    ]
    tables = [
        Table(
            f"A = {names[0]}, B = {names[1]}",
            ("", ""),
            (*(facts if parting.step is not None else facts[:2]), *(("warning", text) for text in warnings)),
        )
    ]
    rest = len(known.leaves) - _SHOWN
    settings = (*known.settings, *known.rates)
    rows = [
        *((leaf.path, leaf.text) for leaf in known.leaves[:_SHOWN]),
        *([(f"... {rest} more", "see --json")] if rest > 0 else []),
    ]
    drifts = (("Settings that differ", settings), ("Environments and versions that differ", known.environment))
    tables += (
        [Table(f"Leaves that differ at step {known.apart_at}", ("leaf", "by how much"), tuple(rows))] if rows else []
    )
    tables += [Table(title, ("key", "A", "B"), lines) for title, lines in drifts if lines]
    error = None
    if parting.step is not None:
        error = Different(" and ".join(names), expected="two runs that did the same", found=f"runs that {parting}",
                          fix=f"{_next_move(parting)}see the tables; `trainfold diff` compares two checkpoints, `trainfold replay` runs one of the runs again")  # fmt: skip
    data: dict[str, Any] = {
        "a": names[0],
        "b": names[1],
        "step": parting.step,
        "cause": parting.cause,
        "names": list(parting.names),
        "may_be": list(parting.may_be),
        "text": str(parting),
        "rank": known.rank,
        "difference": difference_data(known.difference),
        "same_at": known.same_at,
        "apart_at": known.apart_at,
        "leaves": [attrs.asdict(leaf, filter=lambda field, _: field.name != "ulps") for leaf in known.leaves],
        "absent": list(known.absent),
        "settings": [dict(zip(("name", "a", "b"), line, strict=True)) for line in settings],
        "environment": [dict(zip(("name", "a", "b"), line, strict=True)) for line in known.environment],
        "seeds": None if known.seeds is None else list(known.seeds),
        "repeats": list(known.repeats),
        "repeats_itself": list(known.own),
        "reached": list(known.reached),
        "warnings": warnings,
    }
    return Answer(data, tuple(tables), error)

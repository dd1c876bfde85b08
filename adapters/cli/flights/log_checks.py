"""Whether the flight logs of two runs can be believed, and how far they go: before they are compared."""

import attrs

from trainfold.adapters.cli.flights.read_run import Logs, ReadRun, recorded_environment
from trainfold.backends.flight.flights import flight_name
from trainfold.core.flight.flight import Flight, state_digests
from trainfold.core.flight.holes import steps_in_neither, steps_unrecorded
from trainfold.core.flight.step_difference import last_result, steps_with_other_batch_digests
from trainfold.core.format.leaf_texts import fingerprints
from trainfold.core.markup.texts import steps_are, steps_text
from trainfold.core.state.audit import unsaved_of


def believed(run: ReadRun, other: Logs) -> tuple[ReadRun, list[str]]:
    """A run with its logs as far as they count, and what is to be said of the rest.

    A log that knows another state than a checkpoint of its own run is not of this run from there on.

    Args:
        run: the run.
        other: the logs of the run that it is compared with.
    """
    saved, where, flights = {*run.saved}, run.where, run.flights
    warnings = [] if flights else [f"{where} has no flight log: what its steps did is not known"]
    warnings += [f"{where} has no {flight_name(rank)}, and the other run has one" for rank in sorted(other.keys() - flights.keys()) if flights]  # fmt: skip
    counted = {}
    for rank, flight in flights.items():
        name = f"{where}/{flight_name(rank)}"
        counted[rank], wrong = _own(run, flight, saved)
        last = max([*flight.steps, *(each.last for each in flight.left_out)], default=0)
        if wrong:
            warnings.append(f"{name} {wrong}")
        elif not last and not flight.damage:
            warnings.append(f"{name} is empty, or not a file: what the steps did is not known")
        elif last and last < max(saved, default=0):
            warnings.append(f"{name} ends at step {last}, and the run has a checkpoint of step {max(saved)}")
    return attrs.evolve(run, flights=counted), warnings


def _own(run: ReadRun, flight: Flight, saved: set[int]) -> tuple[Flight, str]:
    """A log up to the last state before it contradicts a checkpoint, and how it does; of several ranks each may have a part of the state, and none is compared."""
    known = 0
    for step in sorted(saved & flight.states.keys()):
        manifest = run.checkpoint(step).manifest
        if manifest.world_size > 1:
            return flight, ""
        digests = state_digests(step, fingerprints(manifest))
        wrong = [each.component for each in digests if flight.states[step].get(each.component, each.digest) != each.digest]  # fmt: skip
        if wrong:
            text = f"is not used{f' after step {known}' if known else ''}: at step {step} it has another state of {', '.join(wrong)} than the checkpoint; it is not of this run, or what the program did between that step and the save changed it"  # fmt: skip
            return flight.until(known), text
        known = step
    return flight, ""


def uncompared(runs: tuple[ReadRun, ReadRun]) -> list[str]:
    """What is to be said of two runs that are the same as far as they are known, and of which results are not known."""
    one, other = (run.flights for run in runs)
    ranks, saved = one.keys() & other.keys(), runs[0].saved.keys() & runs[1].saved.keys()
    states = max([*saved, *(step for rank in ranks for step in one[rank].states.keys() & other[rank].states.keys())], default=0)  # fmt: skip
    known = max([states, *(last_result(one[rank], other[rank]) for rank in ranks)])
    end = min(run.last for run in runs)
    held = [_components(run) for run in runs]
    apart = sorted(held[0] ^ held[1]) if all(held) else []
    found = [f"the log of one of them alone has states of {', '.join(apart)}, which were not compared"] if apart else []
    found += [text for run in runs for text in _torn_states(run)]
    if known < end:
        found.append(f"no loss, norm or state {f'after step {known} ' if known else ''}is known of both: the results of {steps_text(known + 1, end)} were not compared")  # fmt: skip
    if not states:
        found.append("there is no step of which both have a checkpoint: their states were not compared")
    elif states < known:
        found.append(f"no state after step {states} is known of both: after it their losses and norms alone were compared")  # fmt: skip
    return found


def _components(run: ReadRun) -> set[str]:
    """Those of whose states the logs of a run have digests."""
    return {name for flight in run.flights.values() for each in flight.states.values() for name in each}


def _torn_states(run: ReadRun) -> list[str]:
    """What is to be said of logs that end among the digests of a state, as by a power cut."""
    found = []
    for rank, flight in run.flights.items():
        *before, last = sorted(flight.states) or [0]
        lost = sorted(flight.states[before[-1]].keys() - flight.states[last].keys()) if before else []
        if lost:
            found.append(f"{run.where}/{flight_name(rank)} lacks the states of {', '.join(lost)} at step {last}, the last one there: its end may be torn off")  # fmt: skip
    return found


def unrecorded_batches(runs: tuple[ReadRun, ReadRun], step: int) -> list[str]:
    """What is to be said of two runs that part in a step, of whose batches one of them has no digest."""
    names = [
        name
        for name, run in zip("AB", runs, strict=True)
        if any(step in flight.steps and flight.steps[step].batch is None for flight in run.flights.values())
    ]
    if not names:
        return []
    return [f"the batches of step {step} are not recorded in {' and '.join(names)}: the loop read others than those of `live.batches`, or left out one without `live.drop_window()`"]  # fmt: skip


def log_warnings(
    runs: tuple[ReadRun, ReadRun],
    names: tuple[str, str],
    *,
    after: int = 0,
    until: int | None = None,
) -> list[str]:
    """What the logs of two runs have not: lines that cannot be read, and steps of which only the other one has a record.

    Args:
        runs: the runs.
        names: of the runs, in a sentence.
        after: name holes after this step.
        until: and up to this one; None for all.
    """
    found = []
    for run, beside, name in zip(runs, runs[::-1], names, strict=True):
        own, other = run.flights, beside.flights
        found += [flight.damage.text_of(f"{run.where}/{flight_name(rank)}") for rank, flight in own.items() if flight.damage]  # fmt: skip
        found += [each.text_of(f"{run.where}/{flight_name(rank)}") for rank, flight in own.items() for each in flight.left_out
                  if each.last > after and (until is None or each.first <= until)]  # fmt: skip
        for rank in sorted(own.keys() & other.keys()):
            found += _holes(steps_unrecorded(own[rank], other[rank]), f"in {name}", rank, after, until)
    one, other = (run.flights for run in runs)
    for rank in sorted(one.keys() & other.keys()):
        found += _holes(steps_in_neither(one[rank], other[rank]), f"in {names[0]}, nor in {names[1]}", rank, after, until)  # fmt: skip
        steps = [each for each in steps_with_other_batch_digests(one[rank], other[rank]) if after < each <= (each if until is None else until)]  # fmt: skip
        if steps:
            found.append(f"the batches of {steps_text(steps[0], steps[-1])}{f' of rank {rank}' if rank else ''} were not compared: one log has digests of every byte of them, the other of samples, as of an older version")  # fmt: skip
    return found


def _holes(holes: tuple[tuple[int, int], ...], where: str, rank: int, after: int, until: int | None) -> list[str]:
    """The steps without a record, after one and up to another one, in words."""
    cut = ((max(first, after + 1), last if until is None else min(last, until)) for first, last in holes)
    of = f" of rank {rank}" if rank else ""
    return [f"{steps_are(*hole)} not recorded {where}{of}" for hole in cut if hole[0] <= hole[1]]


def ended_apart(runs: tuple[ReadRun, ReadRun]) -> list[str]:
    """What is to be said of two runs of which one did more steps, which nothing was compared with."""
    ends = [run.last for run in runs]
    if ends[0] == ends[1]:
        return []
    names = "AB" if ends[0] < ends[1] else "BA"
    return [
        f"{names[0]} ends at step {min(ends)}, and {names[1]} at step {max(ends)}: nothing after step {min(ends)} was compared"
    ]


def replayed_otherwise(run: ReadRun, replay: ReadRun, name: str, begin: int, end: int) -> str:
    """In which versions and which numerical environment a replay was not like the run that it repeats, and what it lacked of it; empty if nothing is known.

    Args:
        run: the run.
        replay: what its program wrote again.
        name: of the run, in a sentence.
        begin: the step of the checkpoint that the replay began with.
        end: its last step.
    """
    made = max((step for step in replay.saved if step > begin), default=None)
    if made is None or not run.saved:
        return ""
    there = min((step for step in run.saved if step >= end), default=max(run.saved))
    manifests = [each.checkpoint(step).manifest for each, step in ((run, there), (replay, made))]
    found = [recorded_environment(each) for each in manifests]
    away = [f"{key} {found[1][key]}, not {found[0][key]}" for key in found[0].keys() & found[1].keys() if found[0][key] != found[1][key]]  # fmt: skip
    unsaved = {path for each in manifests for path in unsaved_of(each.contract)} if begin else set()
    where = [*(["in another environment"] if away else []), *(["without what no checkpoint has"] if unsaved else [])]
    return f"{name} was run again {' and '.join(where)}, so that another result says nothing: {'; '.join([*sorted(away), *sorted(unsaved)])}" if where else ""  # fmt: skip

"""Whether the flight logs of two runs can be believed, and how far they go: before they are compared."""

from pathlib import Path

from trainfold.adapters.cli.flights.scratch_run import Logs, last_step, saved_steps
from trainfold.adapters.cli.locate import open_checkpoint
from trainfold.backends.flight.flights import flight_name
from trainfold.backends.stores.place import url_text
from trainfold.core.flight.flight import Flight, state_digests
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.leaf_texts import fingerprints
from trainfold.core.resume.drift import ENVIRONMENT


def believed(run: Path, flights: Logs, other: Logs) -> tuple[Logs, list[str]]:
    """The logs of a run as far as they count, and what is to be said of the rest.

    A log that knows another state than a checkpoint of its own run is not of this run from there on.

    Args:
        run: the run.
        flights: its logs by rank.
        other: those of the run that it is compared with.
    """
    saved = {*saved_steps(run)}
    where = url_text(str(run))
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
    return counted, warnings


def _own(run: Path, flight: Flight, saved: set[int]) -> tuple[Flight, str]:
    """A log up to the last state before it contradicts a checkpoint, and how it does; of several ranks each may have a part of the state, and none is compared."""
    known = 0
    for step in sorted(saved & flight.states.keys()):
        manifest = open_checkpoint(run / directory_of(step)).manifest
        if manifest.world_size > 1:
            return flight, ""
        digests = state_digests(step, fingerprints(manifest))
        wrong = [each.component for each in digests if flight.states[step].get(each.component, each.digest) != each.digest]  # fmt: skip
        if wrong:
            text = f"is not used{f' after step {known}' if known else ''}: it is not of this run, as at step {step} it has another state of {', '.join(wrong)} than the checkpoint"
            return flight.until(known), text
        known = step
    return flight, ""


def uncompared(flights: tuple[Logs, Logs]) -> list[str]:
    """What is to be said of two runs whose steps are the same, and of which no state was saved that both have."""
    one, other = flights
    if any(one[rank].states.keys() & other[rank].states.keys() for rank in one.keys() & other.keys()):
        return []
    return ["there is no step of which both have a checkpoint: their states were not compared"]


def ended_apart(runs: tuple[Path, Path], flights: tuple[Logs, Logs]) -> list[str]:
    """What is to be said of two runs of which one did more steps, which nothing was compared with."""
    ends = [last_step(run, logs) for run, logs in zip(runs, flights, strict=True)]
    if ends[0] == ends[1]:
        return []
    names = "AB" if ends[0] < ends[1] else "BA"
    return [
        f"{names[0]} ends at step {min(ends)}, and {names[1]} at step {max(ends)}: nothing after step {min(ends)} was compared"
    ]


def replayed_otherwise(run: Path, replay: Path, name: str, begin: int, end: int) -> str:
    """In which versions and which numerical environment a replay was not like the run that it repeats; empty if none is known.

    Args:
        run: the run.
        replay: what its program wrote again.
        name: of the run, in a sentence.
        begin: the step of the checkpoint that the replay began with.
        end: its last step.
    """
    made = max((step for step in saved_steps(replay) if step > begin), default=None)
    saved = saved_steps(run)
    if made is None or not saved:
        return ""
    there = min((step for step in saved if step >= end), default=max(saved))
    found = [_surroundings(path, step) for path, step in ((run, there), (replay, made))]
    unlike = [f"{key} {found[1][key]}, not {found[0][key]}" for key in found[0].keys() & found[1].keys() if found[0][key] != found[1][key]]  # fmt: skip
    return f"{name} was run again in another environment, so that another result says nothing: {'; '.join(sorted(unlike))}" if unlike else ""  # fmt: skip


def _surroundings(run: Path, step: int) -> dict[str, str]:
    """The versions of libraries and the numerical environment of a checkpoint."""
    manifest = open_checkpoint(run / directory_of(step)).manifest
    drifts = {key: repr(value) for key, value in manifest.contract.items() if key.startswith(ENVIRONMENT)}
    return {**drifts, **manifest.versions}

"""What the checkpoints and the logs of two runs show about where they part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import attrs

from trainfold.adapters.cli.flights.replay_run import first_of_ranks
from trainfold.adapters.cli.flights.scratch_run import Logs, saved_steps
from trainfold.adapters.cli.locate import Checkpoint, open_checkpoint
from trainfold.core.flight.evidence import Evidence, LeafApart
from trainfold.core.flight.leaf_kinds import generators, host_stream, is_draw, is_seed
from trainfold.core.flight.step_difference import StepDifference, host_draws, step_difference
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.leaf_texts import leaf_texts
from trainfold.core.resume.drift import ENVIRONMENT
from trainfold.core.state.notes import CONVERTED, FROZEN_LIST, LINEAGE

_ABSENT: Final = "absent"
_SHOWN: Final = ("samples", "batch", "streams", "loss", "norm")
Pair: TypeAlias = tuple[Checkpoint, Checkpoint]
Texts: TypeAlias = tuple[dict[str, str], dict[str, str]]


def evidence_of(runs: tuple[Path, Path], flights: tuple[Logs, Logs]) -> Evidence:
    """What is known of two runs without running them again.

    Args:
        runs: the runs.
        flights: their logs by rank, as far as they count.

    Raises:
        CheckpointMissing: if one of them has neither a checkpoint nor a log.
    """
    saved = tuple({*saved_steps(run, has_log=bool(flight))} for run, flight in zip(runs, flights, strict=True))
    known = _of_checkpoints(*runs, *saved)
    found = first_of_ranks(*flights, after=0)
    if found is not None:
        known = attrs.evolve(known, difference=found[1], rank=_only_rank(flights, *found))
    known = attrs.evolve(known, unrecorded=_unrecorded(*flights, known))
    return _of_steps(*flights, known)


def unlike_leaves(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What differs, but for streams that programs seldom seed, and for what workers of a loader drew ahead."""
    return {
        path: (one.get(path, _ABSENT), other.get(path, _ABSENT))
        for path in {**one, **other}
        if one.get(path) != other.get(path) and not host_stream(path) and not is_draw(path)
    }


def _of_checkpoints(a: Path, b: Path, mine: set[int], theirs: set[int]) -> Evidence:
    """What the checkpoints show that both runs have, from the first to the first that differs."""
    same_at = apart_at = None
    if not (mine and theirs):
        return Evidence()
    pair = open_checkpoint(a / directory_of(min(mine))), open_checkpoint(b / directory_of(min(theirs)))
    texts = _texts(pair)
    unlike: dict[str, tuple[str, str]] = {}
    host: tuple[str, ...] | None = None
    for at in sorted(mine & theirs):
        pair = open_checkpoint(a / directory_of(at)), open_checkpoint(b / directory_of(at))
        texts = _texts(pair)
        host = _host_apart(texts) if host is None else host
        unlike = unlike_leaves(*texts)
        if not all(map(is_seed, unlike)):
            apart_at = at
            break
        same_at = at
    contracts = [each.manifest.contract for each in pair]
    drifts = unlike_leaves(
        *(
            {key: repr(value) for key, value in each.items() if key not in (CONVERTED, LINEAGE, FROZEN_LIST)}
            for each in contracts
        )
    )
    names = [{each.name for each in checkpoint.manifest.components} for checkpoint in pair]
    seeds = [each for path, each in unlike_leaves(*texts).items() if is_seed(path) and _ABSENT not in each]
    return Evidence(
        is_compared=True,
        same_at=same_at,
        apart_at=apart_at,
        leaves=() if apart_at is None else _leaves(pair, unlike),
        absent=tuple(sorted(names[0] ^ names[1])),
        settings=tuple((key, *each) for key, each in drifts.items() if not key.startswith(ENVIRONMENT)),
        environment=tuple((key, *each) for key, each in drifts.items() if key.startswith(ENVIRONMENT)),
        seeds=seeds[0] if seeds and same_at is None else None,
        generators=() if apart_at is None else generators(list(texts[0]), list(unlike)),
        host=host or (),
    )


def _texts(pair: Pair) -> Texts:
    return leaf_texts(pair[0].manifest), leaf_texts(pair[1].manifest)


def _host_apart(texts: Texts) -> tuple[str, ...]:
    """Whose streams of python and numpy are elsewhere."""
    one, other = texts
    apart = (host_stream(path) for path in one if path in other and one[path] != other[path])
    return tuple(sorted({name for name in apart if name}))


def _leaves(pair: Pair, unlike: Mapping[str, tuple[str, str]]) -> tuple[LeafApart, ...]:
    """The leaves that differ, the largest difference first; then those whose difference has no size."""
    from trainfold.adapters.cli.formats.leaf_values import leaf_distances  # late: it imports torch

    apart = leaf_distances(*pair, list(unlike))
    leaves = [
        LeafApart(path, str(apart[path]), apart[path].differing, apart[path].max_abs)
        if path in apart
        else LeafApart(path, f"{a[:60]} and {b[:60]}")
        for path, (a, b) in unlike.items()
    ]
    return tuple(sorted(leaves, key=lambda leaf: (leaf.differing is None, -(leaf.size or 0.0), leaf.path)))


def _only_rank(flights: tuple[Logs, Logs], rank: int, first: StepDifference) -> int | None:
    """The rank, if its logs alone differ in that step as they do: what one rank computes otherwise may reach all of them in the same step."""
    one, other = flights
    found = (step_difference(one[each], other[each], first.step) for each in one.keys() & other.keys())
    alike = [each for each in found if each is not None and each.is_of_one_rank == first.is_of_one_rank]
    return rank if len(alike) == 1 else None


def _unrecorded(one: Logs, other: Logs, known: Evidence) -> tuple[int, int] | None:
    """The steps just before the difference, or the state that differs, of which the logs say nothing together."""
    ends = [] if known.difference is None else [known.difference.step - 1]
    ends += [] if known.apart_at is None else [known.apart_at]
    if not ends:
        return None
    pairs = [(one[rank], other[rank]) for rank in one.keys() & other.keys()]
    both = [max((step for step in a.steps.keys() & b.steps.keys() if step <= min(ends)), default=0) for a, b in pairs]
    begin = max(min(both, default=0), known.same_at or 0) + 1
    return (begin, min(ends)) if begin <= min(ends) else None


def _of_steps(one: Logs, other: Logs, known: Evidence) -> Evidence:
    """The evidence, with what the steps of both logs show up to where the runs part."""
    ends = [step for step in (known.apart_at, known.difference and known.difference.step) if step is not None]
    pairs = [(one[rank], other[rank]) for rank in sorted(one.keys() & other.keys())]
    if not ends or not pairs:
        return known
    end, begin = min(ends), known.same_at or 0
    both = [
        (a.steps[step], b.steps[step])
        for a, b in pairs
        for step in a.steps.keys() & b.steps.keys()
        if begin < step <= end
    ]
    fields = [{name for name in _SHOWN if x.shows(y, name)} for x, y in both]
    earlier = {name for pair, names in zip(both, fields, strict=True) if pair[0].step < end for name in names}
    states = {step for a, b in pairs for step in a.states.keys() & b.states.keys()}
    return attrs.evolve(
        known,
        shown=frozenset(_SHOWN).intersection(*fields) if fields else frozenset(),
        before=frozenset(earlier | ({"state"} if any(begin < step < end for step in states) else set())),
        is_settled=end - 1 in {known.same_at, *states},
        draws=max((host_draws(*pair) for pair in pairs), key=(None, "no", "one", "both").index),
    )

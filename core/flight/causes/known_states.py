"""`of_states`: what the manifests of two runs show about where they part; `SavedState`: what one manifest says."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, final

import attrs

from trainfold.core.flight.causes.evidence import Evidence, LeafApart
from trainfold.core.flight.causes.leaf_kinds import (
    generators,
    host_stream,
    is_count_of_workers,
    is_draw,
    is_order,
    is_position,
    is_rng,
    is_seed,
    is_stream,
    scheduled,
)

VERSIONS: Final = "versions."
"""What the keys of an environment begin with that are versions of libraries."""
_ABSENT: Final = "absent"


@final
@attrs.frozen
class SavedState:
    """What the manifest of a checkpoint says.

    Attributes:
        step: of the checkpoint.
        leaves: path -> kind and contents, in words.
        settings: those of its contract, key -> value, in words.
        environment: the numerical environment, in the same form, and the versions of libraries.
        components: the names of its components.
        ranks: how many saved it.
        is_partial: whether a component was left out of it, so that it cannot show that two states are the same.
        unsaved: the paths of what changes with training and is in no checkpoint, such as a buffer that is not persistent.
        rates: the first rates of groups of optimizers that no scheduler sets, in words, as the contract notes them.
    """

    step: int
    leaves: Mapping[str, str]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    components: frozenset[str]
    ranks: int = 1
    is_partial: bool = False
    unsaved: tuple[str, ...] = ()
    rates: Mapping[str, str] = attrs.field(factory=dict)


Pair: TypeAlias = tuple[SavedState, SavedState]


def unlike_leaves(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What differs, but for streams that programs seldom seed, and for what workers of a loader drew ahead."""
    return {
        path: (one.get(path, _ABSENT), other.get(path, _ABSENT))
        for path in {**one, **other}
        if one.get(path) != other.get(path) and not host_stream(path) and not is_draw(path)
    }


def of_states(first: Pair, pairs: Iterable[Pair], until: int | None) -> Evidence:
    """What the states and the contracts show that both runs have saved, up to the first that differ, or that were saved at or after a step.

    Torch's streams that began elsewhere, by another seed, do not count as a difference where all else is the same: nothing depends on them.

    Args:
        first: the first checkpoint of each run.
        pairs: those of the steps that both have, in order.
        until: the first step in which their logs differ; None if none does.
    """
    same_at, apart_at, compared = None, None, None
    seen, unlike, rest = first, unlike_leaves(first[0].leaves, first[1].leaves), list[str]()
    drifts = settings, rates, environment = _drifts(first)
    host, unsaved = set[str](), set[str]()
    adrift: frozenset[str] | None = None
    for seen in pairs:
        unlike = unlike_leaves(seen[0].leaves, seen[1].leaves)
        for known, more in zip(drifts, _drifts(seen), strict=True):
            known.update(more)
        unsaved |= {*seen[0].unsaved, *seen[1].unsaved}
        if adrift is None:
            host |= _host_apart(seen)
            adrift = frozenset(path for path in unlike if is_stream(path)) if any(map(is_seed, unlike)) else frozenset()
        rest = [path for path in unlike if not is_seed(path) and path not in adrift]
        step = seen[0].step
        if rest or (until is not None and step >= until):
            compared, apart_at = seen, step if rest else None
            host |= _host_apart(seen)
            break
        same_at = same_at if any(each.is_partial for each in seen) else step
    began_alike = same_at is not None and not adrift and _have(seen, is_rng)
    alike = {"start"} if began_alike else set[str]()
    if compared is not None:
        at = min(compared[0].step, compared[0].step if until is None else until)
        alike |= _alike(compared, unlike, host, is_at=at == compared[0].step) - ({"schedule"} if rates else set())
        alike |= {"settings"} if not settings and all(each.settings for each in compared) else set()
        is_of_all = all(each.environment and each.ranks == 1 for each in compared)  # else it is that of rank 0
        alike |= {"environment"} if not environment and is_of_all else set()
        alike |= (
            {"versions"}
            if not any(key.startswith(VERSIONS) for key in environment) and all(each.environment for each in compared)
            else set()
        )
    seeds = [values for path, values in unlike.items() if is_seed(path) and _ABSENT not in values]
    return Evidence(
        alike=frozenset(alike),
        ranks=max(each.ranks for each in seen),
        same_at=same_at,
        apart_at=apart_at,
        leaves=tuple(LeafApart(path, " and ".join(text[:60] for text in unlike[path])) for path in rest) if apart_at else (),
        absent=tuple(sorted(seen[0].components ^ seen[1].components)),
        settings=tuple((key, *each) for key, each in settings.items()),
        rates=tuple((key, *each) for key, each in rates.items()),
        environment=tuple((key, *each) for key, each in environment.items()),
        seeds=seeds[0] if seeds and not began_alike else None,
        generators=generators(list(seen[0].leaves), rest) if apart_at else (),
        host=tuple(sorted(host)),
        unsaved=tuple(sorted(unsaved)),
        workers=_workers_apart(seen),
    )  # fmt: skip


def _alike(pair: Pair, unlike: Mapping[str, object], host: set[str], *, is_at: bool) -> set[str]:  # fmt: skip
    """What two states have both, and have the same, by the names of the exclusions; buffers only if they were saved in the step itself, or there are none."""
    leaves = {**pair[0].leaves, **pair[1].leaves}
    found = {
        "samples": _have(pair, is_position) and not any(map(is_position, unlike)),
        "streams": _have(pair, is_rng) and not any(map(is_stream, unlike)),
        "order": _have(pair, lambda path: path.startswith("dataset")) and not any(map(is_order, unlike)),
        "seed": _have(pair, is_seed) and not any(map(is_seed, unlike)),
        "host_streams": _have(pair, lambda path: bool(host_stream(path))) and not host,
        "generators": not generators(list(leaves), list(unlike)),
        "schedule": _have(pair, lambda path: path.startswith("optimizer.")) and not scheduled(unlike),
        "buffers": _have(pair, lambda path: path.startswith("model"))
        and not any(each.unsaved for each in pair)
        and not any(".buffers[" in path for path in (unlike if is_at else leaves)),
        "component": pair[0].components == pair[1].components,
    }
    return {name for name, holds in found.items() if holds}


def _workers_apart(pair: Pair) -> tuple[str, str] | None:
    """The numbers of workers of the first loader of both, if they are known and not the same."""
    one, other = (
        next((text for path, text in each.leaves.items() if is_count_of_workers(path)), None) for each in pair
    )
    return (one, other) if one and other and one != other else None


def _have(pair: Pair, kind: Callable[[str], bool]) -> bool:
    """Whether both have a leaf of a kind."""
    return all(any(map(kind, each.leaves)) for each in pair)


def _drifts(pair: Pair) -> tuple[dict[str, tuple[str, str]], ...]:
    """What differs in the settings, in the first rates and in the environments."""
    one, other = ((each.settings, each.rates, each.environment) for each in pair)
    return tuple(map(unlike_leaves, one, other))


def _host_apart(pair: Pair) -> set[str]:
    """Whose streams of python and numpy are elsewhere."""
    one, other = pair[0].leaves, pair[1].leaves
    return {host_stream(path) for path in one if path in other and one[path] != other[path]} - {""}

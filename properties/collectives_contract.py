"""The contract of collectives: `check_collectives` checks an implementation of `Collectives`, in worlds of several sizes.

Each rule runs on every rank and returns evidence, which is plain data; the evidence of all ranks is judged outside of the world.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree, TrainfoldError
from trainfold.core.layout.world import Collectives, Exchanges
from trainfold.properties.differences import ContractBroken

__all__ = ["check_collectives"]

Play: TypeAlias = Callable[[Collectives], Any]
Run: TypeAlias = Callable[[int, Play], list[Any]]

_TERMS: Final = (1e8, 1.0, -1e8, 0.1, 3.0, -0.0, 1e-30)  # float32 sums of them depend on the order
_BIG: Final = 2**53 + 1  # not a float64
_LENGTH: Final = 37  # of vectors; not divisible by a number of ranks
_WAIT_SECS: Final = 30.0


def check_collectives(run: Run, *, world_sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Check that collectives keep the contract of `Collectives`.

    Args:
        run: ``run(world_size, function)`` makes a new world, calls the function with each rank's collectives, and returns what they
            returned, in rank order. The functions are those of this module; they do not raise, and return plain data.
        world_sizes: the sizes of the worlds to make: three worlds of each size, one of size 1.

    Raises:
        ContractBroken: naming every broken rule, the world and the rank.

    Examples:
        >>> from trainfold.ranks import run_threads
        >>> check_collectives(run_threads)
    """
    broken = []
    for world_size in world_sizes:
        plays = {**PEACE, **(TROUBLE if world_size > 1 else {})}
        evidence = _evidence(run, world_size)
        for name, (_, expected) in plays.items():
            for rank, wanted in enumerate(expected(world_size)):
                found = evidence[rank][name]
                if found != wanted:
                    about = f"{name}: rank {rank} of {world_size}: expected {wanted!r}, found {found!r}"
                    broken.append(about[:400])
    if broken:
        raise ContractBroken(f"{len(broken)} times a rule is broken:\n  " + "\n  ".join(broken))


def _evidence(run: Run, world_size: int) -> list[dict[str, Any]]:
    worlds = [play_in_peace, a_rank_fails, calls_differ] if world_size > 1 else [play_in_peace]
    evidence: list[dict[str, Any]] = [{} for _ in range(world_size)]
    for play in worlds:
        for found, more in zip(evidence, run(world_size, play), strict=True):
            found.update(more)
    return evidence


# --- what runs on a rank ----------------------------------------------------------------------------------------


def play_in_peace(collectives: Collectives) -> dict[str, Any]:
    """Every rule without a failing rank, in one world, one after the other."""
    return {name: _result(lambda play=play: play(collectives)) for name, (play, _) in PEACE.items()}  # type: ignore[misc]


def a_rank_fails(collectives: Collectives) -> dict[str, Any]:
    """The last rank fails; the others raise in their next call, and in each one after it."""
    last = collectives.world_size - 1
    if collectives.rank == last:
        collectives.fail(ValueError("the disk is gone"))
        return {"a rank that fails is named on every other rank": ["failed"]}
    calls: list[Play] = [
        lambda each: each.gather(1),
        lambda each: each.barrier(timeout_secs=_WAIT_SECS),
        lambda each: each.start_gather([1]).wait(),
    ]
    heard = [_heard(lambda call=call: call(collectives)) for call in calls]  # type: ignore[misc]
    named = [(kind, f"rank {last}" in text and "ValueError: the disk is gone" in text) for kind, text in heard]
    return {"a rank that fails is named on every other rank": named}


def calls_differ(collectives: Collectives) -> dict[str, Any]:
    """Rank 0 gathers while the others sum: no rank waits, and no rank gets a result."""

    def play() -> object:
        return collectives.gather(1) if collectives.rank == 0 else collectives.all_sum([torch.ones(3)])

    return {"calls that differ are refused on every rank": _heard(play)[0]}


def _ranks_and_sizes(collectives: Collectives) -> object:
    return isinstance(collectives, Collectives), collectives.rank, collectives.world_size


def _integers(collectives: Collectives) -> object:
    first = torch.arange(_LENGTH) * _BIG + collectives.rank
    return [total.tolist() for total in collectives.all_sum([first, torch.tensor(collectives.rank), first[:0]])]


def _floats(collectives: Collectives) -> object:
    term = _TERMS[collectives.rank % len(_TERMS)]
    single = torch.full((_LENGTH,), term)
    totals = collectives.all_sum([single, single.double() / 3, torch.tensor(collectives.rank), single.bfloat16()])
    return [str(total.dtype) for total in totals], _bits(totals[0]), totals[1].tolist(), totals[3].tolist()


def _shapes(collectives: Collectives) -> object:
    given = [torch.ones(2, 3), torch.ones(()), torch.ones(0, 4), torch.ones(4, 2).t()]
    return [(list(total.shape), total.sum().item()) for total in collectives.all_sum(given)], collectives.all_sum([])


def _inputs(collectives: Collectives) -> object:
    mine = torch.ones(3)
    (total,) = collectives.all_sum([mine])
    total += 1 + collectives.rank
    collectives.barrier(timeout_secs=_WAIT_SECS)
    return mine.tolist(), total.tolist()


def _gathered(collectives: Collectives) -> object:
    value: dict[str, Any] = {
        "rank": collectives.rank,
        "parts": (1, "é", None, True, 0.1),
        "long": "x" * (7000 * collectives.rank),
    }
    return [
        (each["rank"], each["parts"], len(each["long"]))
        for each in collectives.gather(value, doing="gather", is_vote=True)
    ]


def _started(collectives: Collectives) -> object:
    """Rank 0 starts before the others do, because they wait for it elsewhere; and other calls come before it is waited for."""
    other = collectives.duplicate()
    if collectives.rank:
        other.barrier(timeout_secs=_WAIT_SECS)
    mine = [collectives.rank, -(2**62), 2**62 + collectives.rank]
    first, second = collectives.start_gather(mine, doing="start"), collectives.start_gather(mine[:1])
    if not collectives.rank:
        other.barrier(timeout_secs=_WAIT_SECS)
    return collectives.gather("meanwhile"), second.wait(), first.wait()


def _copied(collectives: Collectives) -> object:
    last = collectives.world_size - 1
    mine: list[int] = []
    shared = collectives.broadcast(mine, source=last, doing="copy", is_vote=True)
    shared.append(collectives.rank)
    collectives.barrier(timeout_secs=_WAIT_SECS)
    return collectives.gather(shared)


def _broadcast(collectives: Collectives) -> object:
    """Each rank is the source once, of a value that is the longer the higher its rank."""
    mine = {"rank": collectives.rank, "long": "x" * (7000 * collectives.rank)}
    given = [collectives.broadcast(mine, source=source) for source in range(collectives.world_size)]
    return [(each["rank"], len(str(each["long"]))) for each in given]


def _exchanged(collectives: Collectives) -> object:
    """Each rank gets what every other one has for it, which may be nothing. Collectives may lack this call."""
    rank, ranks = collectives.rank, range(collectives.world_size)

    def part(source: int, target: int) -> bytes:
        return bytes([source, target]) * (3_000 * ((source + target) % 2)) if source != target else b""

    if not isinstance(collectives, Exchanges):
        return True
    sizes = [len(part(source, rank)) for source in ranks]
    parts = [[memoryview(part(rank, target))] * (target != rank) for target in ranks]
    found = collectives.exchange(parts, sizes, doing="exchange")
    return [bytes(each) for each in found] == [part(source, rank) for source in ranks]


def _exchanged_in_groups(collectives: Collectives) -> object:
    """Even and odd ranks exchange among themselves, and then the lower half and the upper half, which may be one rank."""
    rank, size = collectives.rank, collectives.world_size
    if not isinstance(collectives, Exchanges):
        return True
    halves = range(size // 2), range(size // 2, size)
    for among in (range(rank % 2, size, 2), next(half for half in halves if rank in half)):
        sizes = [0 if source == rank else 100 * source + rank for source in among]
        parts = [[memoryview(bytes([rank]) * (100 * rank + target))] * (target != rank) for target in among]
        found = collectives.exchange(parts, sizes, among=among, doing="exchange in groups")
        if [bytes(each) for each in found] != [
            bytes([source]) * size for source, size in zip(among, sizes, strict=True)
        ]:
            return False
    return True


def _bad_source(collectives: Collectives) -> object:
    return [
        _heard(lambda source=source: collectives.broadcast(1, source=source))[0]  # type: ignore[misc]
        for source in (-1, collectives.world_size)
    ]


def _duplicated(collectives: Collectives) -> object:
    """Pending calls of the copy do not block those of the original, whichever comes first."""
    copy = collectives.duplicate()
    other: list[object] = []
    late = threading.Thread(target=lambda: other.append(_result(lambda: copy.gather(copy.rank))))
    if collectives.rank:
        late.start()
    mine = collectives.gather(-collectives.rank)
    if not collectives.rank:
        late.start()
    late.join(_WAIT_SECS)
    return isinstance(copy, Collectives), mine, other


def _bits(tensor: torch.Tensor) -> list[int]:
    bits: list[int] = tensor.view(torch.int32).tolist()
    return bits


def _result(play: Callable[[], object]) -> object:
    try:
        return play()
    except Exception as error:  # noqa: BLE001  # it is evidence
        return f"{type(error).__name__}: {error}"


def _heard(play: Callable[[], object]) -> tuple[str, str]:
    try:
        return "returned", repr(play())
    except TrainfoldError as error:
        return type(error).__name__, str(error) if error.fix else ""
    except Exception as error:  # noqa: BLE001  # it is evidence
        return type(error).__name__, str(error)


# --- what must be returned --------------------------------------------------------------------------------------------


def _same(value: Callable[[int], object]) -> Callable[[int], list[Any]]:
    return lambda world_size: [value(world_size)] * world_size


def _wanted_integers(world_size: int) -> object:
    ranks = sum(range(world_size))
    return [[world_size * index * _BIG + ranks for index in range(_LENGTH)], ranks, []]


def _wanted_floats(world_size: int) -> object:
    singles = [torch.full((_LENGTH,), _TERMS[rank % len(_TERMS)]) for rank in range(world_size)]
    total, double, half = singles[0].clone(), singles[0].double() / 3, singles[0].bfloat16()
    for single in singles[1:]:
        total, double, half = total + single, double + single.double() / 3, half + single.bfloat16()
    dtypes = ["torch.float32", "torch.float64", "torch.int64", "torch.bfloat16"]
    return dtypes, _bits(total), double.tolist(), half.tolist()


PEACE: Final[dict[str, tuple[Play, Callable[[int], list[Any]]]]] = {
    "a rank knows its number and the size of its world": (
        _ranks_and_sizes,
        lambda world_size: [(True, rank, world_size) for rank in range(world_size)],
    ),
    "integers are summed exactly": (_integers, _same(_wanted_integers)),
    "floats are added in rank order, to the same bits on every rank": (_floats, _same(_wanted_floats)),
    "sums have the shapes of their terms": (
        _shapes,
        _same(lambda n: ([([2, 3], 6.0 * n), ([], 1.0 * n), ([0, 4], 0.0), ([2, 4], 8.0 * n)], [])),
    ),
    "a sum leaves its terms alone and belongs to its rank": (
        _inputs,
        lambda n: [([1.0] * 3, [n + 1.0 + rank] * 3) for rank in range(n)],
    ),
    "values are gathered in rank order, large ones too": (
        _gathered,
        _same(lambda n: [(rank, (1, "é", None, True, 0.1), 7000 * rank) for rank in range(n)]),
    ),
    "a broadcast value is that of its source, a large one too": (
        _broadcast,
        _same(lambda n: [(rank, 7000 * rank) for rank in range(n)]),
    ),
    "numbers that are started are gathered later, and no rank waits at their start": (
        _started,
        _same(lambda n: (["meanwhile"] * n, [(r,) for r in range(n)], [(r, -(2**62), 2**62 + r) for r in range(n)])),
    ),
    "each rank has its own copy of what it is given": (_copied, _same(lambda n: [[rank] for rank in range(n)])),
    "a duplicate has the same ranks and waits only for its own calls": (
        _duplicated,
        _same(lambda n: (True, [-rank for rank in range(n)], [list(range(n))])),
    ),
    "each rank gets the part that every other one has for it": (_exchanged, _same(lambda _: True)),
    "each rank of a group gets the part that every other one of it has for it": (
        _exchanged_in_groups,
        _same(lambda _: True),
    ),
    "a source outside of the world is refused": (_bad_source, _same(lambda _: [InvalidArgument.__name__] * 2)),
}
TROUBLE: Final[dict[str, tuple[Play, Callable[[int], list[Any]]]]] = {
    "a rank that fails is named on every other rank": (
        a_rank_fails,
        lambda n: [[(RankFailed.__name__, True)] * 3] * (n - 1) + [["failed"]],
    ),
    "calls that differ are refused on every rank": (calls_differ, _same(lambda _: RanksDisagree.__name__)),
}

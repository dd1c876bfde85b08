"""The contract of a parallelism: `check_parallelism` checks an implementation of `Parallelism`, in worlds of several sizes.

Each rule runs on every rank, with a small model whose sums of gradients are exact, and returns evidence, which is plain data. The
evidence of all ranks is judged outside of the world.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import torch

from trainfold.core.layout.parallelism import Parallelism
from trainfold.properties.differences import ContractBroken

__all__ = ["check_parallelism"]

Wrap: TypeAlias = Callable[[torch.nn.Module], tuple[torch.nn.Module, Parallelism]]
Play: TypeAlias = Callable[[Wrap], dict[str, Any]]
Run: TypeAlias = Callable[[int, Play], list[dict[str, Any]]]

_SHAPE: Final = (2, 4)  # of the model's weight
_MICROBATCHES: Final = 3
_WINDOW: Final = 1 + 2 + 3  # the factors of its microbatches
_BIG: Final = 2**53 + 1  # not a float64
_INEXACT: Final = (0.1, 1e16, -1e16, 1.0, 1e-9)  # terms whose sum depends on their order


def check_parallelism(run: Run, *, world_sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Check that a parallelism keeps the promises of `Parallelism`.

    Args:
        run: ``run(world_size, play)`` starts so many ranks, calls ``play(wrap)`` on each, and returns what they returned, in rank order.
            ``wrap(model)`` is yours: it returns the model as it is trained, wrapped or sharded, and its parallelism. The result is plain data.
        world_sizes: the sizes of the worlds to start, one of each. Two numbers have one sum, so an order of summation shows only from three ranks on.

    Raises:
        ContractBroken: naming every broken rule, the world and the rank.

    Examples:
        >>> from trainfold.ranks import Replicas, run_threads
        >>> check_parallelism(lambda size, play: run_threads(size, lambda ranks: play(lambda model: (model, Replicas(ranks)))))
    """
    broken = [
        f"with {world_size} ranks: {about}"[:400]
        for world_size in world_sizes
        for about in _judged(run(world_size, play_by_the_rules), world_size)
    ]
    if broken:
        raise ContractBroken(f"{len(broken)} times a rule is broken:\n  " + "\n  ".join(broken))


# --- what runs on a rank ----------------------------------------------------------------------------------------


def play_by_the_rules(wrap: Wrap) -> dict[str, Any]:
    """Run every rule on a rank, one after the other.

    Args:
        wrap: makes a model one of this parallelism.
    """
    inner = torch.nn.Linear(_SHAPE[1], _SHAPE[0], bias=False)
    with torch.no_grad():
        inner.weight.zero_()
    model, ranks = wrap(inner)
    here = ranks.coordinates
    found: dict[str, Any] = {
        "is": isinstance(ranks, Parallelism),
        "world": (here.world.rank, here.world.size),
        "data": (here.data.rank, here.data.size),
        "divisor": ranks.gradient_divisor,
        "none": float(ranks.norm([])),
    }
    mine = torch.tensor([1 + here.data.rank, _BIG])
    (total,) = ranks.all_sum([mine])
    found["sum"] = total.tolist(), mine.tolist(), ranks.all_sum([])
    (inexact,) = ranks.all_sum([torch.tensor(_INEXACT, dtype=torch.float64).roll(here.data.rank)])
    found["bits"] = [each.hex() for each in inexact.tolist()]
    found["window"] = _window(model, ranks)
    _clear(model)
    with ranks.gradient_sync(enabled=False):
        with suppress(ZeroDivisionError), ranks.gradient_sync(enabled=True):
            _ = 1 / 0  # an error of the loop
        _backward(model, ranks, 1)
    held = _mine(model, ranks)
    _backward(model, ranks, 1)
    found["put back"] = held, _mine(model, ranks)
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    if ranks.gradient_divisor is None:
        grads = ranks.all_sum(grads)
    found["norm"] = float(ranks.norm(grads)) * (ranks.gradient_divisor or 1)
    found["local"] = _is_memory(model, ranks)
    return found


def _window(model: torch.nn.Module, ranks: Parallelism) -> list[list[float]]:
    """The gradients of a window after each of its backwards; only the last one synchronises."""
    after = []
    for index in range(_MICROBATCHES):
        with ranks.gradient_sync(enabled=index == _MICROBATCHES - 1):
            _backward(model, ranks, index + 1)
        after.append(_mine(model, ranks))
    return after


def _backward(model: torch.nn.Module, ranks: Parallelism, factor: int) -> None:
    """A backward whose gradient is ``factor * (share + 1)`` everywhere, an exact sum in any order."""
    (model(torch.ones(1, _SHAPE[1])) * (factor * (ranks.coordinates.data.rank + 1))).sum().backward()


def _mine(model: torch.nn.Module, ranks: Parallelism) -> list[float]:
    """The distinct values of this rank's gradients, over all shares of the data, before they are divided."""
    held = [ranks.local(each.grad) for each in model.parameters() if each.grad is not None]
    if ranks.gradient_divisor is None:
        held = ranks.all_sum(held)
    scale = ranks.gradient_divisor or 1.0
    return sorted({round(value * scale, 3) for each in held for value in each.flatten().tolist()})


def _clear(model: torch.nn.Module) -> None:
    for each in model.parameters():
        each.grad = None


def _is_memory(model: torch.nn.Module, ranks: Parallelism) -> bool:
    """Whether what is written into the local part of a parameter is in the parameter."""
    with torch.no_grad():
        for each in model.parameters():
            ranks.local(each).fill_(7)
            if not bool((ranks.local(each) == 7).all()):
                return False
    return True


# --- what must be found -------------------------------------------------------------------------------------------


def _judged(evidence: Sequence[dict[str, Any]], world_size: int) -> list[str]:
    shares = evidence[0]["data"][1]
    total = float(sum(range(1, shares + 1)))
    found: list[str] = []
    readers = [each["data"] for each in evidence]
    if any(readers.count((share, shares)) * shares != world_size for share in range(shares)):
        found.append(f"each share of the data has as many ranks as any other: found {readers}")
    for rank, each in enumerate(evidence):
        terms = [each["data"][0] + 1, _BIG]
        wanted = {
            "it has the methods of Parallelism": (True, each["is"]),
            "a rank knows its number and the size of the world": ((rank, world_size), each["world"]),
            "sums are over the shares and leave their terms alone": (([int(total), shares * _BIG], terms, []), each["sum"]),
            "no gradients have the norm 0": (0.0, each["none"]),
            "a boundary has the gradients of all microbatches and shares": ([total * _WINDOW], each["window"][-1] or [total * _WINDOW]),
            "afterwards a backward synchronises, and adds what was kept": ([2 * total], each["put back"][1] or [2 * total]),
            "the local part of a parameter is its memory": (True, each["local"]),
        }  # fmt: skip
        found += [
            f"{rule}: rank {rank}: expected {expected!r}, found {value!r}"
            for rule, (expected, value) in wanted.items()
            if value != expected
        ]
    if evidence[0]["divisor"] is not None and shares > 1:
        if all(each["window"][0] == [total] for each in evidence):
            found.append("only the boundary synchronises: the first backward of a window did")
        if all(each["put back"][0] == [total] for each in evidence):
            found.append("the setting before comes back after an error: a backward synchronised")
    if len({tuple(each["bits"]) for each in evidence}) > 1:
        found.append(f"sums have the same bits on every rank: found {[each['bits'][0] for each in evidence]}")
    norms = [each["norm"] for each in evidence]
    whole = math.sqrt(_SHAPE[0] * _SHAPE[1]) * 2 * total
    if len(set(norms)) > 1 or not math.isclose(norms[0], whole, rel_tol=1e-5):
        found.append(
            f"the norm is that of the whole gradients, with the same bits on every rank: expected {whole}, found {norms}"
        )
    return found

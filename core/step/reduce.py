"""The one exchange of a step, at the boundary: gradients, loss, weight and metrics are summed over the ranks. Gradients that nothing sums must be equal."""

import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from trainfold.core.errors import RanksDisagree
from trainfold.core.layout.parallelism import Coordinates, Parallelism
from trainfold.core.step.loss import Number, Totals, read

_DIGEST_BYTES = 4  # so that a sum over two million ranks is exact in float64


def exchange(
    totals: Totals, targets: list[torch.nn.Parameter], parallelism: Parallelism, *, mark: int | None = None
) -> Totals:
    """Sum a window over the ranks, with one call of ``all_sum``; the gradients of ``targets`` are replaced.

    Afterwards, a parameter that had a gradient on any rank has one on every rank.

    Args:
        totals: this rank's sums.
        targets: the parameters, in the same order on every rank.
        parallelism: the ranks; a backward has not communicated.
        mark: of this rank's gradients, to exchange too; None for no such mark. Every rank has one, or none has.

    Returns:
        The sums over all ranks and the ranks whose loss or gradients are not finite. Every rank gets the same bits.

    Raises:
        RanksDisagree: if the ranks report metrics of different names.
    """
    trained = [target for target in targets if target.requires_grad]
    present = _filled(trained)
    blocks = _blocks(trained)
    flats = [torch.cat([_grad(target).reshape(-1) for target in block]) for block in blocks]
    found, flats = _exchanged(totals, trained, present, parallelism, mark=mark, seen=flats, summed=flats)
    for block, flat in zip(blocks, flats, strict=True):
        pieces = torch.split(flat, [target.numel() for target in block])
        for target, piece in zip(block, pieces, strict=True):
            if target.grad is not None:
                target.grad.copy_(piece.view_as(target))  # a copy: ranks that are threads may receive the same tensor
    return found


def exchange_totals(
    totals: Totals, targets: list[torch.nn.Parameter], parallelism: Parallelism, *, mark: int | None = None
) -> Totals:
    """As `exchange`, but each gradient stays that of this rank, for ranks that then sum only the rows that each holds.

    Args:
        totals: this rank's sums.
        targets: the parameters, in the same order on every rank.
        parallelism: the ranks.
        mark: as for `exchange`.

    Raises:
        RanksDisagree: if the ranks report metrics of different names.
    """
    trained = [target for target in targets if target.requires_grad]
    present = _filled(trained)
    seen = [_grad(target).reshape(-1) for target in trained if target.numel()]
    return _exchanged(totals, trained, present, parallelism, mark=mark, seen=seen, summed=[])[0]


def _filled(trained: list[torch.nn.Parameter]) -> list[bool]:
    """Give zeros to each parameter without a gradient; return which had one."""
    present = [target.grad is not None for target in trained]
    for target in trained:
        if target.grad is None:
            target.grad = torch.zeros_like(target)
    return present


def _exchanged(  # noqa: PLR0913 - keywords
    totals: Totals,
    trained: list[torch.nn.Parameter],
    present: list[bool],
    parallelism: Parallelism,
    *,
    mark: int | None,
    seen: list[torch.Tensor],
    summed: list[torch.Tensor],
) -> tuple[Totals, list[torch.Tensor]]:
    """The sums of the totals and of some tensors, with one call of ``all_sum``; gradients that no rank has are dropped.

    Args:
        totals: this rank's sums.
        trained: the parameters.
        present: which of them had a gradient.
        parallelism: the ranks.
        mark: as for `exchange`.
        seen: the gradients, which must be finite.
        summed: what is summed.
    """
    world, names = parallelism.coordinates.data, sorted(totals.metrics)
    numbers = _local_numbers(totals, seen, names, parallelism.coordinates)
    if mark is not None:
        numbers += [float(mark if rank == world.rank else 0) for rank in range(world.size)]
    stats = torch.tensor([*numbers, *map(float, present)], dtype=torch.float64)
    stats = stats.to(trained[0].device if trained else "cpu")
    *sums, stats = parallelism.all_sum([*summed, stats])
    found = stats.tolist()
    for target, count in zip(trained, found[len(numbers) :], strict=True):
        if count == 0:
            target.grad = None
    return _global(found, names, world.size, has_marks=mark is not None), sums


def mark_of(gradients: Sequence[torch.Tensor | None]) -> int:
    """A number for which parameters have a gradient: 0 if none has.

    Args:
        gradients: of the parameters, in the same order on every rank.

    Examples:
        >>> mark_of([None, None]), mark_of([torch.ones(1), None]) == mark_of([torch.zeros(2), None])
        (0, True)
    """
    held = bytes(each is not None for each in gradients)
    return 1 + zlib.crc32(held) if any(held) else 0


def unequal_gradients(gradients: Sequence[torch.Tensor | None], parallelism: Parallelism) -> list[int]:
    """Return the places of the gradients whose norms differ between the ranks; with one call of ``all_sum``. Every rank gets the same.

    Args:
        gradients: that no backward sums, of the same parameters on every rank; None where this rank has none.
        parallelism: the ranks.
    """
    held = [each for each in gradients if each is not None]
    norms = iter(read([torch.linalg.vector_norm(each) for each in held]))
    marks = [mark for each in gradients for mark in _marks(None if each is None else next(norms))]
    (sums,) = parallelism.all_sum([torch.tensor([marks, [mark * mark for mark in marks]], dtype=torch.float64)])
    size = parallelism.coordinates.data.size
    totals, squares = ([int(each) for each in row] for row in sums.tolist())
    # marks are equal on all ranks where the sum of their squares is as small as their sum allows
    odd = [size * square != total**2 for total, square in zip(totals, squares, strict=True)]
    return [place for place in range(len(gradients)) if odd[2 * place] or odd[2 * place + 1]]


def _marks(norm: float | None) -> tuple[int, int]:
    """Two numbers for a norm, so small that the sum of their squares over two million ranks is exact in float64."""
    digest = hashlib.blake2b(repr(norm).encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest[:2], "little"), int.from_bytes(digest[2:], "little")


def _local_numbers(totals: Totals, flats: list[torch.Tensor], names: list[str], here: Coordinates) -> list[float | int]:
    ratios: list[Number] = [number for name in names for number in totals.metrics[name]]
    peaks = [torch.linalg.vector_norm(flat, math.inf) for flat in flats]  # a maximum keeps NaN and inf
    loss, weight, *rest = read([totals.loss, totals.weight, *ratios, *peaks])
    ratio_numbers, peak_numbers = rest[: len(ratios)], rest[len(ratios) :]
    suspect = not all(map(math.isfinite, [loss, weight, *peak_numbers]))
    # a share may be that of other ranks too: it says which rank it is, counted from 1
    flags = [
        float(here.world.rank + 1 if suspect and share == here.data.rank else 0) for share in range(here.data.size)
    ]
    return [loss, weight, totals.samples, float(_digest(tuple(names))), *flags, *ratio_numbers]


def _global(summed: list[float], names: list[str], world_size: int, *, has_marks: bool) -> Totals:
    loss, weight, samples, digest, *rest = summed
    if digest != _digest(tuple(names)) * world_size:
        raise RanksDisagree(
            "metrics",
            expected=f"{names}, as on this rank",
            found="other names",
            fix="return the same metrics on every rank",
        )
    flags, ratios = rest[:world_size], rest[world_size:]
    marks = ratios[2 * len(names) :][:world_size] if has_marks else []
    return Totals(
        loss=loss,
        weight=weight,
        samples=int(samples),
        metrics={name: (ratios[2 * i], ratios[2 * i + 1]) for i, name in enumerate(names)},
        suspects=[int(flag) - 1 for flag in flags if flag],
        marks=[int(each) for each in marks],
    )


def _blocks(trained: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    blocks: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for target in trained:
        blocks.setdefault((target.dtype, target.device), []).append(target)
    return list(blocks.values())


def _grad(target: torch.nn.Parameter) -> torch.Tensor:
    assert target.grad is not None
    return target.grad


@lru_cache(maxsize=64)
def _digest(names: tuple[str, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=_DIGEST_BYTES).digest(), "little")

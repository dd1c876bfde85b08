"""`gather_rows`: whole tensors from the rows that each rank holds; `sum_rows`: the rows of a sum. In rounds, so that what is on its way stays small."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from trainfold.core.layout.placement import Placement
from trainfold.core.layout.slices import volume
from trainfold.core.layout.world import Exchanges, World
from trainfold.core.tensor_memory import tensor_bytes

ROUND_BYTES: Final = 64 * 2**20  # of whole tensors; a larger one has a round of its own
_DIGEST_BYTES: Final = 4

Shape = tuple[int, ...]


def gather_rows(  # noqa: PLR0913 - keywords
    rows: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Shape],
    ranks: Exchanges,
    *,
    here: World,
    rule: Placement,
    doing: str,
    round_bytes: int = ROUND_BYTES,
) -> dict[str, torch.Tensor]:
    """Return whole tensors; those without dimensions are taken from this rank.

    Args:
        rows: name -> this rank's rows; the same names in the same order on every rank.
        shapes: name -> the shape of the whole.
        ranks: that exchange them.
        here: this rank.
        rule: which rows a rank holds.
        doing: what each rank does, for the error if one does not, or has other tensors.
        round_bytes: how much is gathered at once.

    Raises:
        RanksDisagree: if a rank has other names, shapes or dtypes, or does something else.
    """
    what = f"{doing}, {_layout(rows, shapes)}"
    found = {name: each.detach() for name, each in rows.items()}
    cut = [name for name in rows if shapes[name]]
    for names in _rounds(cut, {name: volume_bytes(shapes[name], rows[name]) for name in cut}, round_bytes):
        boxes = {name: [rule.box(shapes[name], (rank,))[0] for rank in range(here.size)] for name in names}
        row_bytes = {name: volume_bytes(shapes[name][1:], rows[name]) for name in names}
        sizes = [
            sum((boxes[name][rank][1] - boxes[name][rank][0]) * row_bytes[name] for name in names)
            for rank in range(here.size)
        ]
        mine = [tensor_bytes(found[name]) for name in names]
        come = ranks.exchange(
            [[] if rank == here.rank else mine for rank in range(here.size)],
            [0 if rank == here.rank else size for rank, size in enumerate(sizes)],
            doing=what,
        )
        read = [0] * here.size
        for name in names:
            whole = torch.empty(shapes[name], dtype=rows[name].dtype)
            for rank, (start, stop) in enumerate(boxes[name]):
                if rank == here.rank:
                    whole[start:stop] = found[name]
                    continue
                end = read[rank] + (stop - start) * row_bytes[name]
                if end > read[rank]:
                    tensor_bytes(whole[start:stop])[:] = come[rank][read[rank] : end]
                read[rank] = end
            found[name] = whole.to(rows[name].device)
    return found


def sum_rows(  # noqa: PLR0913 - keywords
    grads: dict[str, torch.Tensor],
    ranks: Exchanges,
    *,
    here: World,
    rule: Placement,
    doing: str,
    round_bytes: int = ROUND_BYTES,
) -> dict[str, torch.Tensor]:
    """Return this rank's rows of the sums, added in rank order: the bits of ``all_sum``. Tensors without dimensions are left out.

    Args:
        grads: name -> this rank's whole tensor; the same names in the same order on every rank. What is summed is taken out.
        ranks: that exchange them.
        here: this rank.
        rule: which rows a rank holds.
        doing: what each rank does, for the error if one does not, or has other tensors.
        round_bytes: how much is summed at once.

    Raises:
        RanksDisagree: if a rank has other names, shapes or dtypes, or does something else.
    """
    shapes = {name: tuple(each.shape) for name, each in grads.items()}
    what = f"{doing}, {_layout(grads, shapes)}"
    cut = [name for name in grads if shapes[name]]
    sums: dict[str, torch.Tensor] = {}
    for names in _rounds(cut, {name: grads[name].nbytes for name in cut}, round_bytes):
        given = {name: grads.pop(name).detach().contiguous() for name in names}
        boxes = {name: [rule.box(shapes[name], (rank,))[0] for rank in range(here.size)] for name in names}
        mine = {name: each[slice(*boxes[name][here.rank])] for name, each in given.items()}
        size = sum(each.nbytes for each in mine.values())
        come = ranks.exchange(
            [
                [] if rank == here.rank else [tensor_bytes(given[name][slice(*boxes[name][rank])]) for name in names]
                for rank in range(here.size)
            ],
            [0 if rank == here.rank else size for rank in range(here.size)],
            doing=what,
        )
        read = 0
        for name, own in mine.items():
            terms = []
            for rank, data in enumerate(come):
                terms.append(own if rank == here.rank else torch.empty(own.shape, dtype=own.dtype))
                if rank != here.rank and own.nbytes:
                    tensor_bytes(terms[rank])[:] = data[read : read + own.nbytes]
            total = terms[0].to(own.device, copy=True)
            for each in terms[1:]:
                total += each.to(own.device)
            sums[name] = total
            read += own.nbytes
    return sums


def _layout(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]) -> str:
    """What must be equal on all ranks, in a few words."""
    text = repr([(name, shapes[name], str(each.dtype)) for name, each in tensors.items()])
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{len(tensors)} tensors of layout {digest}"


def volume_bytes(shape: Shape, like: torch.Tensor) -> int:
    """The bytes of a tensor of this shape and another one's dtype.

    Examples:
        >>> volume_bytes((2, 3), torch.zeros(1))
        24
    """
    return volume(tuple((0, size) for size in shape)) * like.element_size()


def _rounds(names: Sequence[str], sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in their order, in lists whose sizes add up to at most a limit, unless one alone is larger."""
    held: list[str] = []
    total = 0
    for name in names:
        if held and total + sizes[name] > limit:
            yield held
            held, total = [], 0
        held.append(name)
        total += sizes[name]
    if held:
        yield held

"""`supplied`: what a source of weights yields. What it raises, or yields instead of a tensor, is an error that names it."""

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch

from trainfold.core.errors import SourceFailed, TrainfoldError, error_text
from trainfold.core.json_values import shown
from trainfold.core.state.spec import dtype_name
from trainfold.core.weights.account import Account
from trainfold.core.weights.source import (
    FIX_OF_SOURCE,
    MemoryOf,
    Wanted,
    WeightSource,
    source_name,
    supply_of,
    without_memory,
)


def supplied(
    source: WeightSource, wanted: Mapping[str, Wanted], memory: MemoryOf = without_memory
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield what a source supplies, and close it at the end.

    Args:
        source: of the weights.
        wanted: what it is asked for.
        memory: into which it may read, if it can; see `FillingSource`.

    Raises:
        SourceFailed: for an error of the source's own, or something else than a name and a tensor. An error of trainfold's stays as it is.

    Examples:
        >>> class Mine:
        ...     def supply(self, wanted):
        ...         yield "w", torch.ones(1)
        ...         raise OSError("the disk is gone")
        >>> dict(supplied(Mine(), {}))
        Traceback (most recent call last):
            ...
        trainfold.core.errors.SourceFailed: weights from Mine: expected a name and a tensor, found OSError: the disk is gone, after 1 tensor, the last of \
them 'w'; fix the source, from the error above; trainfold.properties.contracts.check_weight_source tests one
    """
    count, last = 0, ""
    items: Iterator[Any] | None = None
    try:
        while True:
            try:
                items = iter(supply_of(source, wanted, memory)) if items is None else items
                item = next(items, None)
            except TrainfoldError:
                raise
            except Exception as error:
                raise _failed(source, error_text(error), count, last) from error
            if item is None:
                return
            if not _is_pair(item):
                raise _failed(source, shown(item), count, last)
            count, last = count + 1, item[0]
            yield item
    finally:
        # now, and not when the error is forgotten: other ranks may wait for what a source sends
        getattr(items, "close", lambda: None)()


def part_of(source: WeightSource, account: Account, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that belongs to this rank, noted in the account.

    Raises:
        InvalidState: as `Account.part_of` does.
        SourceFailed: for a tensor without plain values.
    """
    box = account.part_of(name, dtype_name(tensor.dtype), tensor.shape)
    odd = (
        "one without values, on the meta device" if tensor.is_meta
        else f"the layout {tensor.layout}" if tensor.layout is not torch.strided
        else f"a {type(tensor).__qualname__} of several ranks" if hasattr(tensor, "full_tensor")
        else ""
    )  # fmt: skip
    if odd:
        raise SourceFailed(
            f"weights[{name!r}] from {source_name(source)}",
            expected="a dense tensor of this process: all of it, or the box of this rank",
            found=odd,
            fix="yield tensor.to_dense(), or tensor.full_tensor() on every rank, or load it first",
        )
    return tensor.detach()[box]


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)  # fmt: skip


def _failed(source: WeightSource, found: str, count: int, last: str) -> SourceFailed:
    at = f"after {count} tensor{'' if count == 1 else 's'}, the last of them {last!r}" if count else "before the first one"  # fmt: skip
    return SourceFailed(
        f"weights from {source_name(source)}", expected="a name and a tensor", found=f"{found}, {at}", fix=FIX_OF_SOURCE
    )

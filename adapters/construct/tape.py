"""`Tape`: every call that made or wrote a tensor while a model was built, and which of them a tensor's value needs."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch

EMPTY: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
        torch.ops.aten.empty_permuted.default,
    }
)
"""Calls that make memory and give it no value."""


@final
@attrs.frozen
class Place:
    """Where a tensor lies: a storage, by its number on the tape, and a view of it.

    Attributes:
        storage: the number.
        dtype: of the elements.
        shape: of the tensor.
        stride: in elements.
        offset: of the first element, in elements.
        is_conj: whether the values are the conjugates of what the memory has.
        is_neg: whether they are its negatives.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    is_conj: bool = False
    is_neg: bool = False


@final
@attrs.frozen
class Constant:
    """A tensor that had values when it was passed to a call.

    Attributes:
        value: a copy.
    """

    value: torch.Tensor


@final
@attrs.define(eq=False)
class RecordedCall:
    """A call that made or wrote tensors.

    Attributes:
        function: what was called: an operator, or a function that writes its first argument.
        args: its arguments, with a `Place` or a `Constant` for each tensor.
        kwargs: the same for keywords.
        made: the place of each tensor that it returned in new memory, and None for every other result.
        reads: the storages of its arguments.
        writes: the storages that it wrote or made.
        draws: whether it drew random numbers.
        replaces: the storage of which it wrote every byte, without a look at what was there.
        default_dtype: torch's, at the call.
        owner: the FQN of the tensor that its random numbers belong to.
        ordinal: which draw of its owner it is, from 0.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Place | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    draws: bool
    replaces: int | None
    default_dtype: torch.dtype
    owner: str = ""
    ordinal: int = 0


@final
class Tape:
    """The calls of one build, in their order.

    Attributes:
        calls: that were recorded.
        sizes: storage -> its bytes, once the build is over.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.sizes: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        """How much it has; calls hold whole tensors."""
        return f"<Tape of {len(self.calls)} calls>"

    def add(self, call: RecordedCall) -> None:
        """Record one more call."""
        for storage in call.writes:
            self._writers.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)

    def written_with(self, storages: set[int]) -> set[int]:
        """Return all storages that the last writers of these have written."""
        last = (self._writers[each][-1] for each in storages if each in self._writers)
        return {storage for place in last for storage in self.calls[place].writes}

    def calls_for(self, storage: int) -> list[RecordedCall]:
        """Return the calls that the last value of a storage depends on, in their order."""
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        wanted = [(storage, len(self.calls))]
        while wanted:
            storage, end = wanted.pop()
            writers = self._writers.get(storage, [])
            for place in reversed(writers[: bisect_left(writers, end)]):
                if (storage, place) in seen:
                    break
                seen.add((storage, place))
                call = self.calls[place]
                if place not in found:
                    found.add(place)
                    wanted += [(each, place) for each in call.reads if each != call.replaces]
                if call.replaces == storage:
                    break
        return [self.calls[place] for place in sorted(found)]

    def give_owners(self, named: dict[str, int]) -> None:
        """Give each draw to the tensor in whose memory it is, or to the first tensor made of it, and count the draws of each.

        Args:
            named: FQN -> storage, in the order of the module.
        """
        owners: dict[int, str] = {}
        for name, storage in named.items():
            owners.setdefault(storage, name)
        for call in self.calls:
            if call.draws:
                call.owner = next((owners[each] for each in sorted(call.writes) if each in owners), "")
        for name, storage in named.items():
            for call in self.calls_for(storage):
                if call.draws and not call.owner:
                    call.owner = name
        counts: dict[str, int] = {}
        for call in self.calls:
            if call.draws and call.owner:
                call.ordinal = counts.get(call.owner, 0)
                counts[call.owner] = call.ordinal + 1

"""`value_of`: makes the value of a recorded tensor on the CPU, by the calls that it needs."""

from collections.abc import Sequence
from typing import Any, Final, final

import torch

from trainfold.adapters.construct.tape import EMPTY, Constant, Place, RecordedCall, Tape
from trainfold.core.rng import Key, fold_in, forked_rng
from trainfold.core.tensor_memory import fill_unset

CPU: Final = torch.device("cpu")


def value_of(
    tape: Tape,
    place: Place,
    key: Key | None,
    calls: Sequence[RecordedCall] | None = None,
    *,
    memory: torch.UntypedStorage | None = None,
) -> torch.Tensor:
    """Return the value that a place has after the recorded calls; bytes that no call wrote are `unset`.

    Law: it is a function of the calls and the key: which other tensors are made, and in which order, changes no bit.

    Args:
        tape: the calls.
        place: of the tensor.
        key: the source of random numbers; None if no call draws.
        calls: that it needs, if they are known already.
        memory: on the CPU, of the size of the recorded storage, and unset; it is used if the calls allow it.
    """
    calls = tape.calls_for(place.storage) if calls is None else calls
    last = {storage: index for index, call in enumerate(calls) for storage in (*call.reads, *call.writes)}
    replay = _Replay(tape, {} if memory is None else {place.storage: memory})
    with torch.no_grad():
        for index, call in enumerate(calls):
            replay.run(call, key)
            replay.free([each for each in (*call.reads, *call.writes) if last[each] == index and each != place.storage])
        return replay.tensor(place)


@final
class _Replay:
    """The memory of the storages that are needed now."""

    def __init__(self, tape: Tape, memory: dict[int, torch.UntypedStorage]) -> None:
        self._tape, self._memory = tape, memory

    def tensor(self, place: Place) -> torch.Tensor:
        if place.storage not in self._memory:
            fresh = torch.empty(self._size(place), dtype=torch.uint8, device=CPU)
            fill_unset(fresh.untyped_storage(), place.dtype)
            self._memory[place.storage] = fresh.untyped_storage()
        empty = torch.empty(0, dtype=place.dtype, device=CPU)
        found = empty.set_(self._memory[place.storage], place.offset, place.shape, place.stride)
        found = torch.conj(found) if place.is_conj else found
        return torch._neg_view(found) if place.is_neg else found  # noqa: SLF001  # there is no public name

    def run(self, call: RecordedCall, key: Key | None) -> None:
        if call.function in EMPTY:
            return  # `tensor` makes the memory, unset
        args = [restored(each, self.tensor) for each in call.args]
        kwargs = {name: restored(each, self.tensor) for name, each in call.kwargs.items()}
        before = torch.get_default_dtype()
        try:
            if before != call.default_dtype:
                torch.set_default_dtype(call.default_dtype)
            if call.draws and key is not None:
                with forked_rng(fold_in(key, call.owner, call.ordinal)):
                    found = call.function(*args, **kwargs)
            else:
                found = call.function(*args, **kwargs)
        finally:
            if before != call.default_dtype:
                torch.set_default_dtype(before)
        self._keep(call.made, found)

    def free(self, storages: Sequence[int]) -> None:
        for each in storages:
            self._memory.pop(each, None)

    def _keep(self, made: Sequence[Place | None], found: Any) -> None:
        for place, value in zip(made, results(found), strict=True):
            if place is None:
                continue
            memory = value.untyped_storage()
            is_alike = value.stride() == place.stride and value.storage_offset() == place.offset
            is_new = all(memory.data_ptr() != other.data_ptr() for other in self._memory.values())
            if is_alike and is_new and memory.nbytes() == self._size(place) and not value.is_conj() | value.is_neg():
                self._memory[place.storage] = memory
            else:
                self._memory.pop(place.storage, None)
                self.tensor(place).copy_(value)

    def _size(self, place: Place) -> int:
        return self._tape.sizes[place.storage]


def results(found: Any) -> list[Any]:
    """Return what a call returned as a flat list.

    Examples:
        >>> results((1, [2, 3]))
        [1, 2, 3]
    """
    if isinstance(found, list | tuple):
        return [each for one in found for each in results(one)]
    return [found]


def restored(value: Any, tensor: Any) -> Any:
    """Return an argument of a call with a tensor for each place and each constant."""
    if isinstance(value, Place):
        return tensor(value)
    if isinstance(value, Constant):
        return value.value.clone()
    if isinstance(value, list | tuple):
        return [restored(each, tensor) for each in value]
    return value

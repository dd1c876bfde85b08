"""`FirstRank`: rank 0 reads from a source and sends the tensors to the other ranks in pieces, so that only its machine has to reach the source."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from math import prod
from typing import Any, Final, final

import torch

from trainfold.core.errors import TrainfoldError, error_text, rank_failed
from trainfold.core.format.codec import torch_dtype
from trainfold.core.layout.slices import whole_box
from trainfold.core.layout.world import Collectives
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.account import Account
from trainfold.core.weights.several.cover import cover
from trainfold.core.weights.several.several_sources import specs_of
from trainfold.core.weights.several.source_text import described, pinned, sources_in
from trainfold.core.weights.source import Wanted, WeightSource
from trainfold.core.weights.supplied import part_of, supplied
from trainfold.core.weights.wrapped import check_wrapped, is_list

_PIECE_BYTES: Final = 32 << 20
_DOING: Final = "send weights"


@final
class FirstRank:
    """A source that rank 0 reads for all ranks. Each rank keeps what it wants; a rank holds the largest tensor, or 32 MiB, beside its own.

    Args:
        source: what rank 0 reads, also a list of sources. The other ranks never use theirs.
        collectives: the ranks; all of them call.

    Raises:
        InvalidArgument: for `Frozen` and `ByScript`, also in a list: rank 0 cannot send what each rank's script has made.

    Examples:
        >>> from trainfold.backends.ranks.in_process import run_threads
        >>> class Ones:
        ...     def supply(self, wanted):
        ...         yield from ((name, torch.ones(each.shape)) for name, each in wanted.items())
        >>> wanted = {"w": Wanted("float32", (2,), ((0, 2),))}
        >>> run_threads(2, lambda world: dict(FirstRank(Ones(), world).supply(wanted)))
        [{'w': tensor([1., 1.])}, {'w': tensor([1., 1.])}]
    """

    def __init__(self, source: WeightSource, collectives: Collectives) -> None:
        for each in sources_in(source):
            check_wrapped("FirstRank.source", each)
        self._source = source
        self._world = collectives

    def __repr__(self) -> str:
        return f"FirstRank({described(self._source)})"

    def pinned(self) -> "FirstRank":
        """The same, where rank 0 reads the checkpoint that is the newest now."""
        return FirstRank(pinned(self._source), self._world) if self._world.rank == 0 else self

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor that this rank wants, whole.

        Raises:
            InvalidState: on rank 0, if the sources of a list do not fit the model of all ranks; nothing was sent then.
            RankFailed: if the source of rank 0 has failed; on rank 0 it is the error of the source.
        """
        mine = {name: (each.dtype, each.shape, each.tied_to) for name, each in wanted.items()}
        every: dict[str, Any] = {}
        for each in self._world.gather(mine, doing="ask for weights"):
            every |= each
        asked = {
            name: Wanted(dtype, tuple(shape), whole_box(tuple(shape)), tied)
            for name, (dtype, shape, tied) in every.items()
        }
        batches = self._sent(asked) if self._world.rank == 0 else self._received()
        try:
            for batch in batches:
                for name, tensor in batch:
                    if name in wanted:
                        yield name, tensor
        finally:  # a rank that refuses a tensor still takes part, so that all ranks hear of it afterwards
            for _ in batches:
                pass

    def _sent(self, asked: Mapping[str, Wanted]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """What the source supplies, in batches, each of which is sent before it is returned."""
        batch: list[tuple[str, torch.Tensor]] = []
        account = Account(self._source, asked)
        try:
            if is_list(self._source):
                cover(specs_of(self._source), asked).check()
            with closing(supplied(self._source, asked)) as tensors:
                for name, tensor in tensors:
                    batch.append((name, part_of(self._source, account, name, tensor).cpu()))
                    if sum(each.nbytes for _, each in batch) >= _PIECE_BYTES:
                        self._send(batch)
                        yield batch
                        batch = []
        except Exception as error:
            fix = error.fix if isinstance(error, TrainfoldError) else "see the traceback of rank 0"
            self._world.broadcast((None, error_text(error), fix), doing=_DOING)
            raise
        self._send(batch)
        yield batch
        self._world.broadcast(([], "", ""), doing=_DOING)

    def _send(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        if batch:
            heads = [(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in batch]
            self._world.broadcast((heads, "", ""), doing=_DOING)
            for _, each in batch:
                data = tensor_bytes(each)
                for start in range(0, len(data), _PIECE_BYTES):
                    self._world.broadcast(bytes(data[start : start + _PIECE_BYTES]), doing=_DOING)

    def _received(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        while True:
            heads, error, fix = self._world.broadcast((None, "", ""), doing=_DOING)
            if heads is None:
                raise rank_failed(0, expected="weights from its source", found=error, fix=fix)
            if not heads:
                return
            yield [(name, self._tensor(dtype, tuple(shape))) for name, dtype, shape in heads]

    def _tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = torch.empty(shape, dtype=torch_dtype(dtype))
        memory = tensor_bytes(found)
        for start in range(0, prod(shape) * found.itemsize, _PIECE_BYTES):
            piece = self._world.broadcast(b"", doing=_DOING)
            memory[start : start + len(piece)] = piece
        return found

"""`write_file`: writes one safetensors file of a plan. Bytes are streamed in the order of the plan and hashed while in the cache.

With `Writes`, the files of a rank become durable together. A disk takes about as long to sync one file as several, because what is synced first takes
the others along, and it does not write while it syncs.

A piece here is a run of consecutive bytes of a tensor, at most `PIECE_BYTES`; in `core.save.file_layout` it is a tensor or a slice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from types import TracebackType
from typing import Protocol, cast, final, runtime_checkable

import numpy as np
import torch
import xxhash

from trainfold.backends.stores.protocol import Buffer, Place, Store, SyncsLater
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import SaveFailed
from trainfold.core.format.manifest import PIECE_BYTES
from trainfold.core.layout.slices import Box, run_blocks, whole_box
from trainfold.core.save.file_layout import FilePlan, TensorPlacement
from trainfold.core.save.written import PartDigests, WrittenFile
from trainfold.core.tensor_memory import tensor_bytes


@runtime_checkable
class PiecewiseTensor(Protocol):
    """A tensor that the training uses too, so its bytes are read piece by piece."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def pieces(self, piece_bytes: int, place: Place | None = None, *, until: int | None = None) -> Iterator[memoryview]:
        """Its bytes in order, up to one of them; a second call continues there. The writer uses each piece before it requests the next.

        With ``place``, the bytes are in the memory it returns.
        """


class WritesFiles(Protocol):
    """Where a file is written: a `Store`, or several files that become durable together."""

    @property
    def url(self) -> str: ...  # noqa: D102 - see `Store`

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """See `Store.write`."""


def write_file(
    plan: FilePlan, tensors: Mapping[str, torch.Tensor | PiecewiseTensor], *, store: WritesFiles, directory: str
) -> WrittenFile:
    """Write one file of a save.

    Args:
        plan: the file: its header and the byte range of each tensor.
        tensors: leaf path -> tensor, on any device, or a source, with the dtype and shape of the plan.
        store: the run. The file is durable after its ``write`` or, with `Writes`, after `Writes.finish`.
        directory: the directory of the checkpoint.

    Returns:
        The size and the digests, for the manifest.

    Raises:
        SaveFailed: if a tensor is not as planned, or the store fails; nothing of the file is left.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store, plan = MemoryStore(), FilePlan("a", ("model",), 0, b"head", 4, ())
        >>> write_file(plan, {}, store=store, directory="step-1").size_bytes, store.read("step-1/a")
        (4, b'head')
    """
    stream = _Stream(plan, tensors, f"{store.url}/{directory}/{plan.name}")
    store.write(f"{directory}/{plan.name}", stream, size_bytes=plan.size_bytes)
    return WrittenFile(
        plan.name,
        plan.size_bytes,
        DIGEST_PREFIX + stream.whole.hexdigest(),
        tuple(stream.parts),
    )


@final
class Writes:
    """The files of a block, which are durable after `finish`. Without it, the block leaves none.

    Law: after `finish` the store holds what calls of its ``write`` would have left. A store without `SyncsLater` gets these calls.

    Args:
        store: where to.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> store = MemoryStore()
        >>> with Writes(store) as writes:
        ...     writes.write("step-1/a", [b"12"], size_bytes=2)
        ...     writes.finish()
        >>> store.read("step-1/a")
        b'12'
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._syncs_later = _syncs_later(type(store))
        self._opened = ExitStack()
        self._finish: list[Callable[[], None]] = []

    @property
    def url(self) -> str:
        """That of the store."""
        return self._store.url

    def __enter__(self) -> "Writes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drop the files that are not finished."""
        self._opened.close()

    def write(self, name: str, parts: Iterable[Buffer], *, size_bytes: int) -> None:
        """Write the bytes of a file, as `Store.write` does.

        Raises:
            SaveFailed: as from `Store.write`.
        """
        if self._syncs_later:
            file = cast("SyncsLater", self._store).written_unsynced(name, parts, size_bytes=size_bytes)
            self._finish.append(self._opened.enter_context(file))
        else:
            self._store.write(name, parts, size_bytes=size_bytes)

    def finish(self) -> None:
        """Make all files durable under their names.

        Raises:
            SaveFailed: as from `Store.write`, for the first file that fails.
        """
        for finish in self._finish:
            finish()


def _syncs_later(kind: type) -> bool:
    """Whether a store has a `SyncsLater.written_unsynced` that goes with its ``write``.

    A class that derives from such a store, or an object that forwards to one, may have a ``write`` of its own, which must be called.
    """
    return next(
        (
            "written_unsynced" in vars(each)
            for each in kind.__mro__
            if vars(each).keys() & {"write", "written_unsynced"}
        ),
        False,
    )


@final
class _Stream:
    """The parts of a file, and the digests of the parts that were requested so far."""

    def __init__(self, plan: FilePlan, tensors: Mapping[str, torch.Tensor | PiecewiseTensor], where: str) -> None:
        self.whole = xxhash.xxh3_128()
        self.parts: list[PartDigests] = []
        self._plan = plan
        self._tensors = tensors
        self._where = where
        self._position = 0

    def __iter__(self) -> Iterator[Buffer]:
        return self._parts(None)

    def placed(self, place: Place) -> Iterator[Buffer]:
        """See `Placeable`."""
        return self._parts(place)

    def _parts(self, place: Place | None) -> Iterator[Buffer]:
        yield self._hashed(self._plan.header)
        of_leaf: xxhash.xxh3_128 | None = None  # of the leaf whose first elements were written here
        for placed, following in zip_longest(self._plan.tensors, self._plan.tensors[1:]):
            yield from self._padding(placed.start, placed.path)
            digest, pieces = xxhash.xxh3_128(), _PieceDigests() if placed.stop - placed.start > PIECE_BYTES else None
            begin = self._position
            is_bool = placed.dtype == "bool"
            for piece in self._pieces_of(placed, place):
                if is_bool:
                    _check_bools(piece, f"{self._where}: {placed.path}")
                digest.update(piece)
                if pieces is not None:
                    pieces.update(piece)
                if of_leaf is not None:
                    of_leaf.update(piece)
                yield self._hashed(piece)
            if self._position != placed.stop:
                raise self._broken(placed.path, f"{placed.stop - placed.start} bytes", self._position - begin)
            of_leaf, whole = digest.copy() if placed.is_first_of_whole else of_leaf, ""
            if of_leaf is not None and (following is None or following.path != placed.path):
                for piece in self._rest_of(placed):
                    of_leaf.update(piece)
                whole, of_leaf = DIGEST_PREFIX + of_leaf.hexdigest(), None
            self.parts.append(
                PartDigests(DIGEST_PREFIX + digest.hexdigest(), "" if pieces is None else pieces.text(), whole)
            )
        yield from self._padding(self._plan.size_bytes, "the end")

    def _hashed(self, piece: Buffer) -> Buffer:
        self.whole.update(piece)
        self._position += len(piece)
        return piece

    def _padding(self, until: int, what: str) -> Iterator[Buffer]:
        if until < self._position:
            raise self._broken(what, f"a start at or after byte {self._position}", until)
        if until > self._position:
            yield self._hashed(bytes(until - self._position))

    def _pieces_of(self, placed: TensorPlacement, place: Place | None) -> Iterator[memoryview]:
        tensor = self._tensors.get(placed.path)
        if tensor is None:
            raise self._broken(placed.path, "a tensor for each planned path", "none")
        shape = placed.shape if placed.held is None else tuple(stop - start for start, stop in placed.held)
        if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{placed.dtype}":
            raise self._broken(placed.path, f"torch.{placed.dtype}{list(shape)}", f"{tensor.dtype}{list(tensor.shape)}")
        if not isinstance(tensor, torch.Tensor):
            return tensor.pieces(PIECE_BYTES, place, until=placed.bytes_held[1])
        return _cut(tensor if placed.held is None else _box_of(tensor, placed.box, placed.held))

    def _rest_of(self, placed: TensorPlacement) -> Iterator[memoryview]:
        """The bytes after those that were written, of a tensor whose digest is recorded here."""
        tensor = self._tensors[placed.path]
        if not isinstance(tensor, torch.Tensor):
            yield from tensor.pieces(PIECE_BYTES)
            return
        held = whole_box(tuple(tensor.shape))
        for box in run_blocks(placed.bytes_held[1] // tensor.element_size(), tensor.numel(), tuple(tensor.shape)):
            yield from _cut(_box_of(tensor, box, held))

    def _broken(self, what: str, expected: object, found: object) -> SaveFailed:
        return SaveFailed(
            f"{self._where}: {what}",
            expected=expected,
            found=found,
            fix="plan the save again from the state that is saved; it changed after it was planned",
        )


def _box_of(tensor: torch.Tensor, box: Box, held: Box) -> torch.Tensor:
    """The box of a tensor that holds another one."""
    return tensor.detach()[
        tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, held, strict=True))
    ]


def _cut(tensor: torch.Tensor) -> Iterator[memoryview]:
    data = tensor_bytes(tensor)
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


@final
class _PieceDigests:
    """The digests of each `PIECE_BYTES` of a tensor, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._current = xxhash.xxh3_128()
        self._room = PIECE_BYTES

    def update(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: self._room]
            self._current.update(part)
            self._room -= len(part)
            view = view[len(part) :]
            if not self._room:
                self._done.append(self._current.hexdigest())
                self._current, self._room = xxhash.xxh3_128(), PIECE_BYTES

    def text(self) -> str:
        last = [self._current.hexdigest()] if self._room < PIECE_BYTES else []
        return "".join([*self._done, *last])


def _check_bools(piece: memoryview, where: str) -> None:
    """Refuse a bool whose byte is neither 0 nor 1: torch changes it as soon as it copies it."""
    largest = int(np.frombuffer(piece, dtype=np.uint8).max(initial=0))
    if largest > 1:
        raise SaveFailed(where, expected="bools whose bytes are 0 or 1", found=f"a byte of {largest}",
                         fix="write leaf = leaf.view(torch.uint8) != 0 before it is saved; no copy of torch would keep that byte")  # fmt: skip

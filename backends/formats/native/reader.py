"""`read_tensors`: reads byte ranges straight into the memory of tensors. Sizes are checked first; every byte used is verified."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final, Protocol, final, runtime_checkable

import attrs
import torch
import xxhash

from trainfold.backends.helpers import Helpers, Task
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, CheckpointTorn, InvalidArgument
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.manifest import DIGEST_DIGITS
from trainfold.core.format.manifest import PIECE_BYTES as VERIFIED_BYTES
from trainfold.core.tensor_memory import tensor_bytes

__all__ = ["OpensFiles", "ReadRequest", "fresh_tensor", "read_tensors"]

PIECE_BYTES: Final = 512 << 10  # hashed while it is still in the core's own cache
_THREADS: Final = 2
_THREADED_FROM_BYTES: Final = 4 << 20
_DIMENSIONS_LIMIT: Final = 64  # torch's own

ReadInto = Callable[[memoryview, int], None]


@runtime_checkable
class OpensFiles(Protocol):
    """A `Store` that can keep a file open over many reads: an optional optimization."""

    def opened(self, name: str) -> AbstractContextManager[ReadInto]:
        """Yields a function ``(buffer, start)`` that does what `Store.read_into` does."""


@final
@attrs.frozen
class ReadRequest:
    """One tensor to read.

    Attributes:
        name: the file, ``directory/file``.
        start: first byte in the file.
        stop: one past its last byte.
        dtype: torch's name of the dtype.
        stored: the safetensors dtype.
        shape: the shape, in torch's dtype.
        digest: the digest that its bytes must have.
        path: the leaf path, for messages.
        out: a tensor to read into, or None for a fresh one.
        skip: how many bytes of the range come before those of the tensor.
        pieces: for a range that is a part of what the digest covers: the digests of each of its pieces, as a `ShardRecord` has them.
    """

    name: str
    start: int
    stop: int
    dtype: str
    stored: str
    shape: tuple[int, ...]
    digest: str
    path: str = ""
    out: torch.Tensor | None = None
    skip: int = 0
    pieces: str = ""


def read_tensors(store: Store, requests: Sequence[ReadRequest]) -> list[torch.Tensor]:
    """Read and verify many tensors.

    All requests are checked against their files before the first byte of memory is allocated.

    Args:
        store: the run.
        requests: what to read; an ``out`` has undefined bytes after an error.

    Returns:
        The tensors, in order; on the CPU, unless ``out`` is elsewhere.

    Raises:
        CheckpointTorn: if a file is missing or too short.
        CheckpointHostile: if a range has another size than its dtype and shape, or if the tensors do not fit into memory.
        CheckpointDamaged: if the bytes that were read have another digest.
        InvalidArgument: if an ``out`` has another dtype or shape.
    """
    sizes: dict[str, int | None] = {}
    for request in requests:
        _check(store, request, sizes)
    _check_memory(store, requests)
    # not in the threads: each of them would make the allocator keep another heap
    targets = [_target(store, request) for request in requests]
    runs = [list(run) for run in _by_file(requests)]
    total_bytes = sum(request.stop - request.start for request in requests)
    if total_bytes < _THREADED_FROM_BYTES or len(requests) == 1 or (os.cpu_count() or 1) == 1:
        for run in runs:
            _read_run(store, requests, targets, run)
    else:
        shares = [share for run in runs for share in _split(requests, run, total_bytes // _THREADS)]
        with Helpers(_THREADS - 1) as helpers:
            reads = [helpers.give(Task(partial(_read_run, store, requests, targets, share))) for share in shares]
            for read in reads:
                read.result()
    return [_given(request, target) for request, target in zip(requests, targets, strict=True)]


def fresh_tensor(shape: tuple[int, ...], dtype: str, where: str) -> torch.Tensor:
    """New CPU memory for a tensor of a checkpoint, checked first: a sparse file can claim terabytes and be small on disk.

    Raises:
        CheckpointHostile: if the memory cannot be allocated.

    Examples:
        >>> fresh_tensor((2, 3), "float32", "w").shape
        torch.Size([2, 3])
    """
    try:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise _too_large(where, "memory for it", size_bytes(dtype, shape)) from error


def _check_memory(store: Store, requests: Sequence[ReadRequest]) -> None:
    """Refuse a tensor that cannot fit, before any memory is touched. With overcommitted memory the allocator would not refuse it."""
    fresh = [request for request in requests if request.out is None]
    wanted = sum(request.stop - request.start for request in fresh)
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > limit:
        largest = max(fresh, key=lambda request: request.stop - request.start)
        raise _too_large(
            f"{store.url}/{largest.name} {largest.path}".rstrip(), f"at most the {limit} bytes of memory here", wanted
        )


def _check(store: Store, request: ReadRequest, sizes: dict[str, int | None]) -> None:
    where = f"{store.url}/{request.name} {request.path}".rstrip()
    if len(request.shape) > _DIMENSIONS_LIMIT or any(size < 0 for size in request.shape) or request.dtype not in STORED:
        raise _hostile(where, "a dtype and a shape that torch has", f"{request.dtype} with {len(request.shape)} dims")
    planned = size_bytes(request.dtype, request.shape)
    if STORED[request.dtype].name != request.stored:
        raise _hostile(where, f"{request.dtype} stored as {STORED[request.dtype].name}", request.stored)
    span = request.stop - request.start
    if request.start < 0 or not (request.skip + planned <= span if request.pieces else span == planned):
        raise _hostile(where, f"a range of {planned} bytes", f"[{request.start}, {request.stop})")
    if request.name not in sizes:
        sizes[request.name] = store.size(request.name)
    size = sizes[request.name]
    if size is None or size < request.stop:
        raise CheckpointTorn(
            where,
            expected=f"a file of at least {request.stop} bytes",
            found="no file" if size is None else f"{size} bytes",
            fix="this checkpoint lost bytes after it was committed: load an earlier one",
        )
    out = request.out
    if out is not None and (str(out.dtype) != f"torch.{request.dtype}" or tuple(out.shape) != request.shape):
        raise InvalidArgument(
            f"out for {request.path or request.name}",
            expected=f"torch.{request.dtype}{list(request.shape)}",
            found=f"{out.dtype}{list(out.shape)}",
            fix="pass a tensor like the saved one",
        )


def _by_file(requests: Sequence[ReadRequest]) -> Iterator[list[int]]:
    files: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        files.setdefault(request.name, []).append(index)
    yield from files.values()


def _split(requests: Sequence[ReadRequest], run: list[int], limit_bytes: int) -> Iterator[list[int]]:
    """Cut the reads of one file into shares of about the same size."""
    share: list[int] = []
    held = 0
    for index in run:
        share.append(index)
        held += requests[index].stop - requests[index].start
        if held >= limit_bytes:
            yield share
            share, held = [], 0
    if share:
        yield share


def _target(store: Store, request: ReadRequest) -> torch.Tensor:
    """The tensor to read into: ``out`` itself if its memory has the order of the file, else a fresh one."""
    if request.out is not None and _lies_plainly(request.out):
        return request.out.detach()
    return fresh_tensor(request.shape, request.dtype, f"{store.url}/{request.name} {request.path}".rstrip())


def _given(request: ReadRequest, target: torch.Tensor) -> torch.Tensor:
    if request.out is None:
        return target
    if not _lies_plainly(request.out):
        with torch.no_grad():
            request.out.copy_(target)
    return request.out


def _read_run(store: Store, requests: Sequence[ReadRequest], targets: Sequence[torch.Tensor], run: list[int]) -> None:
    with _opened(store, requests[run[0]].name) as read_into:
        for index in run:
            _read(store, requests[index], targets[index], read_into)


@contextmanager
def _opened(store: Store, name: str) -> Iterator[ReadInto]:
    if isinstance(store, OpensFiles):
        with store.opened(name) as read_into:
            yield read_into
    else:
        yield lambda buffer, start: store.read_into(name, buffer, start=start)


def _read(store: Store, request: ReadRequest, target: torch.Tensor, read_into: ReadInto) -> None:
    memory = tensor_bytes(target)
    if request.pieces:
        _read_pieces(store, request, memory, read_into)
        return
    digest = xxhash.xxh3_128()
    for start in range(0, len(memory), PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        read_into(piece, request.start + start)
        digest.update(piece)
    _check_digest(store, request, request.digest, DIGEST_PREFIX + digest.hexdigest())


def _read_pieces(store: Store, request: ReadRequest, memory: memoryview, read_into: ReadInto) -> None:
    """Read the pieces in which a tensor lies: those inside of it into its memory, and what is beside it nowhere."""
    size = request.stop - request.start
    for number, low in enumerate(range(0, size, VERIFIED_BYTES)):
        high = min(low + VERIFIED_BYTES, size)
        first, last = max(low - request.skip, 0), min(high - request.skip, len(memory))
        is_inside = last - first == high - low
        piece = memory[first:last] if is_inside else memoryview(bytearray(high - low))
        read_into(piece, request.start + low)
        if not is_inside:
            begin = first + request.skip - low
            memory[first:last] = piece[begin : begin + last - first]
        wanted = request.pieces[number * DIGEST_DIGITS :][:DIGEST_DIGITS]
        _check_digest(store, request, DIGEST_PREFIX + wanted, DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(piece))


def _check_digest(store: Store, request: ReadRequest, wanted: str, found: str) -> None:
    if found != wanted:
        raise CheckpointDamaged(
            f"{store.url}/{request.name} {request.path}".rstrip(),
            expected=wanted,
            found=found,
            fix="the bytes changed on disk or on the way: verify the run, and load another checkpoint",
        )


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor has the order of the file, so that bytes can be read straight into it."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _hostile(where: str, expected: object, found: object) -> CheckpointHostile:
    return CheckpointHostile(where, expected=expected, found=found, fix="do not use this checkpoint")


def _too_large(where: str, expected: str, needed_bytes: int) -> CheckpointHostile:
    fix = "if you trust this checkpoint, load it where there is more memory, or fewer components; else an older one"
    return CheckpointHostile(where, expected=expected, found=f"{needed_bytes} bytes to load", fix=fix)

"""`read_tensors`: reads byte ranges straight into the memory of tensors. Sizes are checked first; every byte used is verified."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final, Protocol, final, runtime_checkable

import attrs
import torch
import xxhash

from trainfold.backends.formats.native.scatter import Inside, Scatter, can_scatter
from trainfold.backends.side_by_side import at_once
from trainfold.backends.stores.protocol import ReadsAhead, Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, CheckpointTorn, InvalidArgument
from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.format.manifest import DIGEST_DIGITS
from trainfold.core.format.manifest import PIECE_BYTES as VERIFIED_BYTES
from trainfold.core.tensor_memory import tensor_bytes

PIECE_BYTES: Final = 512 << 10  # hashed while it is still in the core's own cache
_THREADS: Final = 2
_STREAMS: Final = 4  # of a store that is far away: one connection does not fill a network
_THREADED_FROM_BYTES: Final = 4 << 20
_DIMENSIONS_LIMIT: Final = 64  # torch's own

ReadInto = Callable[[memoryview, int], None]


@runtime_checkable
class OpensFiles(Protocol):
    """A `Store` that can keep a file open over many reads: an optional optimization."""

    def opened(self, name: str) -> AbstractContextManager[ReadInto]:
        """Yields a function ``(buffer, start)`` that does what `Store.read_into` does."""


@runtime_checkable
class ReadsInOrder(Protocol):
    """A `Store` that is read by one thread, in the order of names and bytes."""

    in_order: bool


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
        inside: for a part of a shard: where it lies in it. None if the range is the tensor.
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
    inside: Inside | None = None
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
    fresh = [request for request in requests if request.out is None]
    check_memory(
        store, [request.stop - request.start for request in fresh], lambda i: f"{fresh[i].name} {fresh[i].path}"
    )
    # not in the threads: each of them would make the allocator keep another heap
    targets = [_target(store, request) for request in requests]
    runs = [list(run) for run in _by_file(requests)]
    in_order = isinstance(store, ReadsInOrder)
    if in_order:
        runs = sorted(
            (sorted(run, key=lambda index: requests[index].start) for run in runs),
            key=lambda run: requests[run[0]].name,
        )
    total_bytes = sum(request.stop - request.start for request in requests)
    is_little = total_bytes < _THREADED_FROM_BYTES or len(requests) == 1
    if is_little or in_order or (os.cpu_count() or 1) == 1:
        for run in runs:
            _read_run(store, requests, targets, run)
    else:
        threads = _STREAMS if isinstance(store, ReadsAhead) else _THREADS
        shares = [share for run in runs for share in _split(requests, run, total_bytes // threads)]
        at_once([partial(_read_run, store, requests, targets, share) for share in shares], threads=threads)
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


def check_memory(store: Store, sizes: Sequence[int], name: Callable[[int], str]) -> None:
    """Refuse tensors that cannot fit, before any memory is touched. With overcommitted memory the allocator would not refuse them.

    Args:
        store: the run.
        sizes: bytes of each tensor that gets fresh memory.
        name: index of a tensor -> its file and path.

    Raises:
        CheckpointHostile: naming the largest.
    """
    wanted, limit = sum(sizes), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > limit:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise _too_large(f"{store.url}/{name(largest)}".rstrip(), f"at most the {limit} bytes of memory here", wanted)


def _check(store: Store, request: ReadRequest, sizes: dict[str, int | None]) -> None:
    where = f"{store.url}/{request.name} {request.path}".rstrip()
    if len(request.shape) > _DIMENSIONS_LIMIT or any(size < 0 for size in request.shape) or request.dtype not in STORED:
        raise _hostile(where, "a dtype and a shape that torch has", f"{request.dtype} with {len(request.shape)} dims")
    planned = size_bytes(request.dtype, request.shape)
    if STORED[request.dtype].name != request.stored:
        raise _hostile(where, f"{request.dtype} stored as {STORED[request.dtype].name}", request.stored)
    span = request.stop - request.start
    if request.start < 0 or not (_is_part(request) if request.inside is not None else span == planned):
        raise _hostile(where, f"a range of {planned} bytes", f"[{request.start}, {request.stop})")
    if request.name not in sizes:
        sizes[request.name] = store.size(request.name)
    check_size(where, sizes[request.name], request.stop)
    out = request.out
    if out is not None and (str(out.dtype) != f"torch.{request.dtype}" or tuple(out.shape) != request.shape):
        raise InvalidArgument(
            f"out for {request.path or request.name}",
            expected=f"torch.{request.dtype}{list(request.shape)}",
            found=f"{out.dtype}{list(out.shape)}",
            fix="pass a tensor like the saved one",
        )


def check_size(where: str, size: int | None, least: int) -> None:
    """Refuse a file that is missing or too short.

    Raises:
        CheckpointTorn: naming it.
    """
    if size is None or size < least:
        raise CheckpointTorn(
            where,
            expected=f"a file of at least {least} bytes",
            found="no file" if size is None else f"{size} bytes",
            fix="this checkpoint lost bytes after it was committed: load an earlier one",
        )


def _is_part(request: ReadRequest) -> bool:
    """Whether a tensor lies in its shard, and the range too; without the digests of pieces it must be the whole shard."""
    inside, span = request.inside, request.stop - request.start
    if inside is None or not inside.has(request.shape):
        return False
    whole = size_bytes(request.dtype, inside.shape)
    if request.pieces:
        return inside.offset % VERIFIED_BYTES == 0 and 0 <= inside.offset <= whole - span
    return (inside.offset, span) == (0, whole)


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
    """The tensor to read into: ``out`` itself if it is in the memory of the CPU, else a fresh one."""
    if request.out is not None and can_scatter(request.out):
        return request.out.detach()
    return fresh_tensor(request.shape, request.dtype, f"{store.url}/{request.name} {request.path}".rstrip())


def _given(request: ReadRequest, target: torch.Tensor) -> torch.Tensor:
    if request.out is None:
        return target
    if not can_scatter(request.out):
        with torch.no_grad():
            request.out.copy_(target)
    return request.out


def _read_run(store: Store, requests: Sequence[ReadRequest], targets: Sequence[torch.Tensor], run: list[int]) -> None:
    spans = [(requests[index].start, requests[index].stop) for index in run]
    if isinstance(store, ReadsAhead):
        run = sorted(run, key=lambda index: requests[index].start)
    with opened(store, requests[run[0]].name, spans) as read_into:
        for index in run:
            _read(store, requests[index], targets[index], read_into)


@contextmanager
def opened(store: Store, name: str, spans: Sequence[tuple[int, int]]) -> Iterator[ReadInto]:
    """Open a file once for many reads of these ranges, if the store can."""
    if isinstance(store, ReadsAhead):
        with store.reading(name, spans) as read_into:
            yield read_into
    elif isinstance(store, OpensFiles):
        with store.opened(name) as read_into:
            yield read_into
    else:
        yield lambda buffer, start: store.read_into(name, buffer, start=start)


def _read(store: Store, request: ReadRequest, target: torch.Tensor, read_into: ReadInto) -> None:
    if request.inside is not None or not target.is_contiguous():
        _read_part(store, request, target, request.inside or Inside(request.shape, (0,) * target.dim()), read_into)
        return
    memory = tensor_bytes(target)
    digest = xxhash.xxh3_128()
    for start in range(0, len(memory), PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        read_into(piece, request.start + start)
        digest.update(piece)
    _check_digest(store, request, request.digest, DIGEST_PREFIX + digest.hexdigest())


def _read_part(store: Store, request: ReadRequest, target: torch.Tensor, inside: Inside, read_into: ReadInto) -> None:
    """Read what a tensor lies in, piece by piece: straight into its memory where it is one run of it, else through one buffer."""
    run = inside.run(target.shape) if target.is_contiguous() else None
    memory = memoryview(b"") if run is None else tensor_bytes(target)
    begin = 0 if run is None else run[0] * target.element_size() - inside.offset  # where the tensor begins in the range
    scatter = Scatter(target, inside) if run is None else None
    size, digest = request.stop - request.start, xxhash.xxh3_128()
    step = VERIFIED_BYTES if request.pieces else PIECE_BYTES
    buffer = memoryview(b"")
    for number, low in enumerate(range(0, size, step)):
        high = min(low + step, size)
        is_direct = scatter is None and begin <= low and high <= begin + len(memory)
        if not is_direct and not buffer:
            buffer = memoryview(bytearray(min(step, size)))
        piece = memory[low - begin : high - begin] if is_direct else buffer[: high - low]
        read_into(piece, request.start + low)
        if request.pieces:
            wanted = DIGEST_PREFIX + request.pieces[number * DIGEST_DIGITS :][:DIGEST_DIGITS]
            _check_digest(store, request, wanted, DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(piece))
        else:
            digest.update(piece)
        if scatter is not None:
            scatter.put(piece, inside.offset + low)
        elif not is_direct:
            first, last = max(low, begin), min(high, begin + len(memory))
            memory[first - begin : max(first, last) - begin] = piece[first - low : max(first, last) - low]
    if not request.pieces:
        _check_digest(store, request, request.digest, DIGEST_PREFIX + digest.hexdigest())


def _check_digest(store: Store, request: ReadRequest, wanted: str, found: str) -> None:
    if found != wanted:
        raise damaged(f"{store.url}/{request.name} {request.path}".rstrip(), wanted, found)


def damaged(where: str, wanted: str, found: str) -> CheckpointDamaged:
    """The error for bytes with another digest."""
    fix = "the bytes changed on disk or on the way: verify the run, and load another checkpoint"
    return CheckpointDamaged(where, expected=wanted, found=found, fix=fix)


def _hostile(where: str, expected: object, found: object) -> CheckpointHostile:
    return CheckpointHostile(where, expected=expected, found=found, fix="do not use this checkpoint")


def _too_large(where: str, expected: str, needed_bytes: int) -> CheckpointHostile:
    fix = "if you trust this checkpoint, load it where there is more memory, or fewer components; else an older one"
    return CheckpointHostile(where, expected=expected, found=f"{needed_bytes} bytes to load", fix=fix)

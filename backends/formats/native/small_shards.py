"""`SmallShards`: reads many small shards with few reads. To ask for one of them alone costs more than to read it."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from trainfold.backends.formats.native.reader import check_size, damaged, opened
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.format.manifest import FileRecord
from trainfold.core.resume.reads import TensorRead
from trainfold.core.tensor_memory import byte_array

SMALL_BYTES: Final = 16 << 10  # larger ones are read straight into their place
_RUN_BYTES: Final = 1 << 20
_START: Final = itemgetter(0)
_KINDS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class _Part(NamedTuple):
    """A shard: first byte in its file, one past the last, its place in memory, the digest of its bytes, and its leaf."""

    start: int
    stop: int
    memory: npt.NDArray[Any]
    digest: str
    path: str


@final
class SmallShards:
    """Collects the shards of tensors that are small, and reads those that touch in a file at once.

    Args:
        store: the run.
        directory: the checkpoint's.
        files: of its manifest.
    """

    def __init__(self, store: Store, directory: str, files: Sequence[FileRecord]) -> None:
        self._store, self._directory, self._files = store, directory, files
        self._parts: dict[int, list[_Part]] = {}

    def take(self, read: TensorRead, out: torch.Tensor) -> bool:
        """Take a tensor, if each of its shards is small and needed whole.

        Args:
            read: what is read for it.
            out: contiguous memory on the CPU for the slice that is needed; `read` writes into it.

        Returns:
            Whether it is taken.
        """
        record = read.record
        for each in read.shards:
            if each.stop - each.start > SMALL_BYTES or each.box != record.shards[each.shard].box:
                return False
        memory = byte_array(out).view(_KINDS.get(out.element_size(), f"V{out.element_size()}")).reshape(out.shape)
        lows = [low for low, _ in read.wanted]
        parts = []
        for each in read.shards:
            sides = (slice(start - low, stop - low) for (start, stop), low in zip(each.box, lows, strict=True))
            place: Any = (*sides, ...)
            part = memory[place]
            if part.nbytes != each.stop - each.start:
                return False  # the reader of single shards says why
            digest = record.shards[each.shard].digest
            parts.append((each.file, _Part(each.start, each.stop, part, digest, record.path)))
        for file, taken in parts:
            self._parts.setdefault(file, []).append(taken)
        return True

    def check(self) -> None:
        """Check that the files are long enough.

        Raises:
            CheckpointTorn: if a file is missing or too short.
        """
        for file, parts in self._parts.items():
            last = max(parts, key=lambda part: part.stop)
            name = self._name(file)
            check_size(f"{self._store.url}/{name} {last.path}", self._store.size(name), last.stop)

    def read(self) -> None:
        """Read everything that was taken.

        Raises:
            CheckpointDamaged: if bytes have another digest.
        """
        runs = {file: list(_runs(sorted(parts, key=_START))) for file, parts in self._parts.items()}
        longest = max((run[-1].stop - run[0].start for each in runs.values() for run in each), default=0)
        buffer = memoryview(bytearray(longest))
        for file, each in runs.items():
            name = self._name(file)
            spans = [(run[0].start, run[-1].stop) for run in each]
            with opened(self._store, name, spans) as read_into:
                for run in each:
                    first = run[0].start
                    read_into(buffer[: run[-1].stop - first], first)
                    for part in run:
                        self._put(part, buffer[part.start - first : part.stop - first], name)

    def _put(self, part: _Part, data: memoryview, name: str) -> None:
        found = DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(data)
        if found != part.digest:
            raise damaged(f"{self._store.url}/{name} {part.path}", part.digest, found)
        part.memory[...] = np.ndarray(part.memory.shape, part.memory.dtype, data)

    def _name(self, file: int) -> str:
        return self._files[file].path(self._directory)


def _runs(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts that touch, as many as fit into the buffer."""
    run: list[_Part] = []
    for part in parts:
        if run and (part.start != run[-1].stop or part.stop - run[0].start > _RUN_BYTES):
            yield run
            run = []
        run.append(part)
    if run:
        yield run

"""`FilePlan`: one safetensors file, byte by byte: its header and the byte range of each tensor.

A piece here is what a file stores of one tensor, all of it or a slice; in `backends` a piece is a run of bytes of a copy or a write.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, count
from json.encoder import encode_basestring_ascii as _quoted
from typing import Final, NamedTuple, TypeAlias, final

import attrs

from trainfold.core.format.dtypes import STORED, size_bytes, stored_shape
from trainfold.core.format.manifest import Manifest, OtherShards, box_by_rule
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.replica_shares import Piece
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.leaf_path import component_of_leaf
from trainfold.core.state.names.tensor_names import storage_key

ALIGNMENT_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8  # of the header's length, before its text


@final
class TensorPlacement(NamedTuple):
    """The byte range of a tensor, or of a slice of one, in a file. It says nothing of memory; see `Place` of the stores for that.

    Attributes:
        path: the leaf path.
        dtype: torch's name of the dtype.
        stored: the safetensors dtype.
        shape: the shape of the stored part, in torch's dtype.
        start: first byte in the file.
        stop: one past its last byte.
        box: the part of the global tensor, as one (start, stop) pair for each dimension.
        held: the part that the rank holds, if it writes only some of it.
        is_of_whole: whether this is a part of a tensor that the ranks hold whole.
    """

    path: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    start: int
    stop: int
    box: Box
    held: Box | None = None
    is_of_whole: bool = False

    @property
    def is_first_of_whole(self) -> bool:
        """Whether these are the first elements of a tensor that the ranks hold whole: then their writer records the digest of all of it."""
        return self.is_of_whole and not any(start for start, _ in self.box)

    @property
    def bytes_held(self) -> tuple[int, int]:
        """Where these bytes are among those that the rank holds, in row-major order."""
        nbytes, first, step = self.stop - self.start, 0, STORED[self.dtype].itemsize
        for (start, _), (low, high) in zip(self.box[::-1], () if self.held is None else self.held[::-1], strict=False):
            first, step = first + (start - low) * step, step * (high - low)
        return first, first + nbytes


@final
@attrs.frozen
class FilePlan:
    """One safetensors file: its name, its writer and its exact size.

    Attributes:
        name: a single path component.
        components: the components whose tensors it holds, in the order of the state.
        rank: the rank that writes it.
        header: the 8-byte length and the JSON header, padded so that the data begins at a multiple of 4096.
        size_bytes: the size of the whole file.
        tensors: a placement for each stored tensor, in the order of the bytes; the values are elsewhere, in `Snapshot.tensors`.
    """

    name: str
    components: tuple[str, ...]
    rank: int
    header: bytes
    size_bytes: int
    tensors: tuple[TensorPlacement, ...]

    def component_of(self, path: str) -> str:
        """The component of one of its tensors: for most files there is nothing to look for."""
        return self.components[0] if len(self.components) == 1 else component_of_leaf(path)


def plan_file(name: str, components: tuple[str, ...], rank: int, pieces: Iterable[Piece]) -> FilePlan:
    """Lay out one file: the header, then every piece, without gaps.

    Args:
        name: a single path component.
        components: the components whose tensors it holds, in the order of the state.
        rank: the rank that writes it.
        pieces: each stored tensor, or the stored slice of it; component by component, in the order of their tables.
    """
    # Wide dtypes first: the format allows no gaps between tensors, and this order keeps each one aligned to its item size.
    ordered = sorted(pieces, key=lambda piece: -STORED[piece.spec.dtype].itemsize)
    paths, specs, boxes, held = zip(*ordered, strict=True) if ordered else ((), (), (), ())
    # there are many pieces, and few specs and boxes
    keys = [*zip(map(id, specs), map(id, boxes), strict=True)]
    few = dict(zip(keys, zip(specs, boxes, strict=True), strict=True))
    kinds = {
        key: (spec.dtype, STORED[spec.dtype].name, box, *_layout(spec.dtype, box)) for key, (spec, box) in few.items()
    }
    columns = zip(*map(kinds.__getitem__, keys), strict=True) if keys else ((),) * 6
    dtypes, stored, boxes, shapes, texts, sizes = columns
    ends = [0, *accumulate(sizes)]
    header = _header(components, paths, texts, ends[:-1], ends[1:])
    ends = [0, *accumulate(sizes, initial=len(header))]
    are_of_whole = [each is not None and each == whole_box(spec.shape) for each, spec in zip(held, specs, strict=True)]
    rows = zip(paths, dtypes, stored, shapes, ends[1:], ends[2:], boxes, held, are_of_whole, strict=False)
    return FilePlan(name, components, rank, header, ends[-1], tuple(map(TensorPlacement._make, rows)))


def _header(
    components: Sequence[str], paths: Sequence[str], texts: Sequence[str], starts: Sequence[int], stops: Sequence[int]
) -> bytes:
    """The first bytes of a file.

    They are what `canonical_json` would give, but put together: there may be many tensors, and few layouts.

    Args:
        components: of the file.
        paths: of its tensors, in the order of the bytes.
        texts: of each, from `_layout`.
        starts: the first byte of each, after the header.
        stops: one past the last.
    """
    metadata = canonical_json({"__metadata__": {"format": "pt", "trainfold": ",".join(components)}}).decode()
    keys = [*map(storage_key, paths)]
    if len({"__metadata__", *keys}) <= len(keys):
        keys = _each_once(keys, paths)
    rows = [
        f"{_quoted(key)}:{text}{start},{stop}]}}"
        for key, text, start, stop in zip(keys, texts, starts, stops, strict=True)
    ]
    whole = (",".join([metadata[:-1], *rows]) + "}").encode()
    whole += b" " * (-(_LENGTH_BYTES + len(whole)) % ALIGNMENT_BYTES)
    return len(whole).to_bytes(_LENGTH_BYTES, "little") + whole


def _each_once(keys: list[str], paths: Sequence[str]) -> list[str]:
    """Names of tensors, of which some are of a further box of a tensor, or of another one."""
    taken = {"__metadata__": None}
    for key, path in zip(keys, paths, strict=True):
        name = key
        if name in taken:
            more = chain((path,), (f"{path} #{number}" for number in count(2)))
            name = next(each for each in more if each not in taken)
        taken[name] = None
    return [*taken][1:]


_Row: TypeAlias = tuple[int, int, tuple[int, int], str, str, Box]
Stored: TypeAlias = Mapping[int, list[_Row]]
"""File -> start, stop, component and index there, path, dtype and box of what it stores of each tensor, in any order."""


def stored_in(manifest: Manifest) -> Stored:
    """What each file of a manifest stores of the tensors of its components, by its index."""
    found: dict[int, list[_Row]] = {}
    for place, component in enumerate(manifest.components):
        files = {index for index, file in enumerate(manifest.files) if component.name in file.components}
        for table in component.tensors:
            for number, record in enumerate(table):
                for shard in record.shards:
                    if shard.file in files:
                        row = shard.start, shard.stop, (place, number), record.path, record.dtype, shard.box
                        found.setdefault(shard.file, []).append(row)
    places = {component.name: place for place, component in enumerate(manifest.components)}
    for other in manifest.others:
        found.setdefault(other.file, []).extend(_stored_beside(other, manifest, places[other.component]))
    return found


def _stored_beside(other: OtherShards, manifest: Manifest, component: int) -> Iterator[_Row]:
    """The same of shards that are not in the tables."""
    file, table = manifest.files[other.file], manifest.components[component].tensors[0]
    for place, (number, start, stop) in enumerate(zip(other.tensors, other.starts, other.stops, strict=True)):
        record = table[number]
        box = other.boxes.get(place) or box_by_rule(record.shape, record.placement, file.rank)
        assert box is not None, "one without a box is by rule"
        yield start, stop, (component, number), record.path, record.dtype, box


def header_of(manifest: Manifest, index: int, *, stored: Stored | None = None) -> bytes | None:
    """The header that a save writes into a file, rebuilt from the manifest; None for a file without tensors.

    Law: it equals the header in the plan of the file. So a load can compare the bytes of a header, padding included, although it reads no other
    byte that it does not use.

    Args:
        manifest: the manifest of the checkpoint.
        index: the index of the file in the manifest.
        stored: from `stored_in`, for a caller that needs the headers of many files.
    """
    rows = (stored_in(manifest) if stored is None else stored).get(index)
    if not rows:
        return None
    # empty tensors may share a start: then the wider dtype comes first, and otherwise the order of the tables, as in `plan_file`
    found = sorted(rows, key=lambda row: (row[0], row[1], -STORED[row[4]].itemsize, row[2]))
    base = found[0][0]
    texts = [_layout(dtype, box)[1] for *_, dtype, box in found]
    starts, stops = [row[0] - base for row in found], [row[1] - base for row in found]
    return _header(manifest.files[index].components, [row[3] for row in found], texts, starts, stops)


@lru_cache(maxsize=4096)
def _layout(dtype: str, box: Box) -> tuple[tuple[int, ...], str, int]:
    """The shape of a box, what a header says of it up to the place of its bytes, and its size in bytes."""
    shape = tuple(stop - start for start, stop in box)
    row = canonical_json({"dtype": STORED[dtype].name, "shape": stored_shape(dtype, shape), "data_offsets": []})
    return shape, row.decode()[: -len("]}")], size_bytes(dtype, shape)

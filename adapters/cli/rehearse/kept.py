"""`KeptCheckpoints`: keeps the data of checkpoints that may have to be compared, in bounded disk space; measures how far they differ."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias, final

import attrs
import numpy as np
import torch

from trainfold.core.format.codec import torch_dtype
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.format.leaf_texts import fingerprints, labelled, leaf_texts
from trainfold.core.format.manifest import Manifest, ShardRecord, TensorRecord
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.format.structure.places import places
from trainfold.core.rehearsal.leaf_size import LeafSize, Piece, size_of
from trainfold.core.rehearsal.orders import KEPT_NAME
from trainfold.core.rehearsal.trajectory import (
    NOTHING,
    Restless,
    RunDifference,
    SavedStep,
    Stretch,
    differences,
    restless_parts,
)

Key: TypeAlias = tuple[str, int]
Saved: TypeAlias = Mapping[Key, SavedStep]
_PIECE_BYTES: Final = 16 << 20
_MEASURED: Final = 6  # leaves of each component


def saved_of(manifest: Manifest) -> SavedStep:
    """The parts of a checkpoint that are compared: its fingerprints and leaves."""
    return SavedStep(fingerprints(manifest), leaf_texts(manifest))


@final
class KeptCheckpoints:
    """The kept checkpoints of the processes of one run.

    Args:
        home: of the run.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def found(self, number: int | None = None) -> dict[Key, Path]:
        """(manager, step) -> the directory.

        Args:
            number: of the process; None for all. If several processes have a step, that of the first one.
        """
        start = "start-*" if number is None else f"start-{number}"
        paths = sorted(self._home.glob(f"{start}/{KEPT_NAME}/*/step-*"), reverse=True)
        return {(path.parent.name, step): path for path in paths if (step := step_of(path.name)) is not None}

    def size_bytes(self) -> int:
        """Bytes of the data files of the largest checkpoint."""
        return max((_manifest(path).size_bytes for path in self.found().values()), default=0)

    def thin(self, whole: Saved, leaving_out: Restless | None) -> None:
        """Delete the checkpoints that equal those of the whole run, and those after the first that does not.

        Args:
            whole: the checkpoints of the whole run.
            leaving_out: what is not compared; None if that is not known yet.
        """
        unlike: list[int] = []
        for key, path in sorted(self.found().items(), key=lambda item: item[0][1]):
            if (
                key in whole
                and not _is_alike(whole[key], saved_of(_manifest(path)), leaving_out)
                and unlike[:1] in ([], [key[1]])
            ):
                unlike.append(key[1])
            else:
                shutil.rmtree(path)

    def clear(self, *, except_step: int | None = None) -> None:
        """Delete all checkpoints except those of one step."""
        for (_, step), path in self.found().items():
            if step != except_step:
                shutil.rmtree(path)

    def clear_run(self) -> None:
        """Delete what the program itself wrote into the run."""
        for name in ("run", "managers"):
            shutil.rmtree(self._home / name, ignore_errors=True)


@final
@attrs.frozen
class MeasuredDifference:
    """How large a difference between two checkpoints is.

    Attributes:
        step: of both.
        places: the directories of both.
        sizes: leaf -> how large; None if it is not a tensor of one dtype and shape. The first few of each component.
    """

    step: int
    places: tuple[Path, Path]
    sizes: Mapping[str, LeafSize | None]


def difference_size(
    one: KeptCheckpoints, other: KeptCheckpoints, found: tuple[RunDifference, ...]
) -> MeasuredDifference | None:
    """The size of the first difference between components of two runs; None if the data of these checkpoints are gone.

    Args:
        one: the checkpoints of the whole run.
        other: those of the other run.
        found: what differs, in order.
    """
    components = [each for each in found if each.kind == "component"]
    if not components:
        return None
    mine, theirs = one.found(), other.found(components[0].number)
    here = [each for each in components if (each.number, each.step) == (components[0].number, components[0].step)]
    for key in sorted(mine.keys() & theirs.keys()):
        if key[1] != here[0].step:
            continue
        pair = _Opened(mine[key]), _Opened(theirs[key])
        sizes = {path: _size(*pair, path) for each in here for path, *_ in each.leaves[:_MEASURED]}
        if any(size is not None for size in sizes.values()):
            return MeasuredDifference(key[1], (mine[key], theirs[key]), sizes)
    return None


def _is_alike(one: SavedStep, other: SavedStep, leaving_out: Restless | None) -> bool:
    found = differences(_only(one), _only(other), leaving_out=leaving_out or NOTHING)
    return not found or (leaving_out is None and restless_parts(found) is not None)


def _only(saved: SavedStep) -> Stretch:
    return Stretch(
        number=1, resumed_at=0, is_resumed=False, is_cut=True, last_step=0, values={}, saved={("", 0): saved}
    )


def read_index(folder: Path) -> Callable[[str, int], bytes | None]:
    """Return what reads the indexes of ranks in a folder, for `decode_manifest`."""
    return lambda name, _: (folder / name).read_bytes() if (folder / name).is_file() else None


def _manifest(path: Path) -> Manifest:
    return decode_manifest((path / MANIFEST).read_bytes(), str(path), read=read_index(path))


@final
class _Opened:
    """A kept checkpoint, and where the tensor of each leaf is in its files."""

    def __init__(self, path: Path) -> None:
        manifest = _manifest(path)
        self.files = [path / file.name for file in manifest.files]
        self.records = {
            leaf.path: component.tensors[part][leaf.tensor]
            for component in manifest.components
            for part, node in enumerate(component.nodes)
            for leaf in places(node, labelled(component, part))
            if leaf.tensor is not None
        }

    def read(self, shard: ShardRecord, start: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A part of the bytes of a shard, as elements."""
        data = np.fromfile(self.files[shard.file], np.uint8, length, offset=shard.start + start)
        return torch.from_numpy(data).view(dtype)


def _size(one: _Opened, other: _Opened, leaf: str) -> LeafSize | None:
    mine, theirs = one.records.get(leaf), other.records.get(leaf)
    if mine is None or theirs is None or mine.spec != theirs.spec:
        return None
    if [shard.box for shard in mine.shards] != [shard.box for shard in theirs.shards]:
        return None
    return size_of(_pieces(one, other, mine, theirs))


def _pieces(one: _Opened, other: _Opened, mine: TensorRecord, theirs: TensorRecord) -> Iterator[Piece]:
    itemsize, dtype = STORED[mine.dtype].itemsize, torch_dtype(mine.dtype)
    step = _PIECE_BYTES // itemsize * itemsize
    for a, b in zip(mine.shards, theirs.shards, strict=True):
        for at in range(0, a.stop - a.start, step):
            length = min(step, a.stop - a.start - at)
            yield a.box, at // itemsize, one.read(a, at, length, dtype), other.read(b, at, length, dtype)

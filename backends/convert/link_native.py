"""`link_to_run`: a directory of a model hub as a checkpoint of a new run, whose data files are second names of its files."""

from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from trainfold.backends.convert.hub_checks import hub_problems
from trainfold.backends.convert.link_hub import refused
from trainfold.backends.convert.linked_files import LinkedDirectory, NamedFile, link_file
from trainfold.backends.convert.native_contents import Advance, contents_of_weights
from trainfold.backends.convert.native_target import NativeContents
from trainfold.backends.convert.opened_source import OpenedSource
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.library_versions import library_versions
from trainfold.backends.runs.begin import begin_checkpoint
from trainfold.backends.runs.commit import proved_bytes
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.os_errors import named_failures
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.opened import opened_weights
from trainfold.core.digest import DIGEST_PREFIX, digest_of
from trainfold.core.errors import CheckpointDamaged, InvalidArgument
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, directory_of, index_name
from trainfold.core.format.indexes.contributions import contributions_of
from trainfold.core.format.manifest import (
    INLINE_BYTES,
    PIECE_BYTES,
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
    encode_index,
)
from trainfold.core.layout.slices import whole_box
from trainfold.core.save.save_plan import data_file_name
from trainfold.core.save.written import Wrote, whole_manifest
from trainfold.core.state.names.tensor_names import param_name, storage_key
from trainfold.core.weights.hub.file_header import HUB_DTYPES

_MODEL: Final = "model"


def link_to_run(opened: OpenedSource, target: str, *, dry_run: bool, advance: Advance) -> LinkedDirectory:
    """Show a directory of a hub as a checkpoint of a new run. Its files are read once, for the digests of the manifest.

    Args:
        opened: a directory of a hub, or one file.
        target: the run, which does not exist yet, or is empty.
        dry_run: whether nothing is made.
        advance: called with what was read.

    Raises:
        InvalidArgument: if something is at the target, or the files are not those of a checkpoint; the message says why.
        CheckpointDamaged: if the directory is not whole.
        SaveFailed: if files cannot be linked, as to another filesystem.
    """
    assert isinstance(opened.model, HubDirectory), "the caller knows"
    problems, files = hub_problems(opened.model)
    if problems:
        raise CheckpointDamaged(
            problems[0].where, expected=problems[0].expected, found=problems[0].found, fix="see `trainfold verify`"
        )
    with opened_weights(opened.model) as weights:
        contents = contents_of_weights(opened, weights, None, None, advance)
    for path, spec in contents.described[_MODEL].tensors.items():
        if storage_key(path) != param_name(path) or not path.isascii():  # it is escaped there
            raise refused(
                opened.where, f"a tensor called {storage_key(path)}, a name that a checkpoint writes in another way"
            )
        if HUB_DTYPES.get(spec.dtype) != STORED[spec.dtype].name:
            raise refused(opened.where, f"{storage_key(path)} {spec}, which a checkpoint stores in another form")
    directory = directory_of(contents.step)
    linked = tuple(
        NamedFile(f"{directory}/{data_file_name(_MODEL, rank, len(files), '')}", str(file), file.stat().st_size)
        for rank, file in enumerate(files)
    )
    store = LocalStore(target)
    if set(store.list()) - {RUN_FILE, directory} or store.size(f"{directory}/{MANIFEST}") is not None:
        raise InvalidArgument(target, expected="a directory that does not exist yet, or is empty", found=f"one with {store.list()[0]}",
                              fix="name another directory; a run is never written into")  # fmt: skip
    if dry_run:
        return LinkedDirectory(target, linked, {})
    with store.lock():
        store.delete(f"{directory}/")  # of a killed process
        head, _ = begin_checkpoint(store, contents.step)
        Path(target, directory).mkdir()
        with named_failures(target):
            for each in linked:
                link_file(each.source, f"{target}/{each.name}")
        manifest = without_collecting(_manifest)(opened.model, files, contents, head, advance)
        indexes = []
        for rank in range(1 if len(files) == 1 else 0, len(files)):
            data = without_collecting(encode_index)(manifest, rank)
            if rank or len(data) > INLINE_BYTES:
                name = index_name(rank, len(files))
                store.write(f"{directory}/{name}", [data], size_bytes=len(data))
                indexes.append(IndexRecord(name, rank, len(data), digest_of(data)))
        parts = {each.name: contributions_of(each, manifest, range(len(files))) for each in manifest.components}
        wrote = [
            Wrote(
                (file,),
                next((each for each in indexes if each.rank == rank), None),
                {name: each[rank] for name, each in parts.items()},
            )
            for rank, file in enumerate(manifest.files)
        ]
        store.commit(f"{directory}/{MANIFEST}", proved_bytes(whole_manifest(manifest, wrote), directory))
        store.point("latest", directory)
    return LinkedDirectory(target, linked, {})


def _manifest(
    source: HubDirectory, files: list[Path], contents: NativeContents, head: Head, advance: Advance
) -> Manifest:
    """The manifest of files as they are, with the digests of what is in them."""
    described = contents.described[_MODEL]
    ranges = source.ranges()
    held: list[dict[str, tuple[int, int]]] = [{} for _ in files]
    for name, (file, start, stop) in ranges.items():
        held[files.index(file)][name] = start, stop
    found = [_digests(file, each, advance) for file, each in zip(files, held, strict=True)]
    records = []
    for path, spec in described.tensors.items():
        name = storage_key(path)
        file, start, stop = ranges[name]
        rank = files.index(file)
        digest, pieces = found[rank][1][name]
        if spec.dtype == "bool":
            _check_bools(file, start, stop, name)
        records.append(
            TensorRecord(
                path, spec.dtype, spec.shape, (ShardRecord(rank, start, stop, whole_box(spec.shape), digest, pieces),)
            )
        )
    names = [data_file_name(_MODEL, rank, len(files), "") for rank in range(len(files))]
    return Manifest(
        head,
        len(files),
        (ComponentRecord(_MODEL, (described.node,), (tuple(records),), ""),),
        contents.omitted,
        contents.contract,
        library_versions(),
        tuple(
            FileRecord(name, (_MODEL,), rank, files[rank].stat().st_size, found[rank][0])
            for rank, name in enumerate(names)
        ),
    )


def _digests(file: Path, held: dict[str, tuple[int, int]], advance: Advance) -> tuple[str, dict[str, tuple[str, str]]]:
    """The digest of a file; and of each tensor in it, with those of its pieces if there are several."""
    whole, found = xxhash.xxh3_128(), dict[str, tuple[str, str]]()
    with file.open("rb") as opened:
        for name, (start, stop) in sorted(held.items(), key=lambda each: each[1]):
            whole.update(opened.read(start - opened.tell()))  # the header
            of_tensor, pieces = xxhash.xxh3_128(), []
            for low in range(start, stop, PIECE_BYTES):
                data = opened.read(min(PIECE_BYTES, stop - low))
                whole.update(data)
                of_tensor.update(data)
                pieces.append(xxhash.xxh3_128_hexdigest(data))
                advance(len(data))
            found[name] = DIGEST_PREFIX + of_tensor.hexdigest(), "".join(pieces) if len(pieces) > 1 else ""
        whole.update(opened.read())
    return DIGEST_PREFIX + whole.hexdigest(), found


def _check_bools(file: Path, start: int, stop: int, name: str) -> None:
    largest = int(np.memmap(file, np.uint8, "r")[start:stop].max(initial=0))
    if largest > 1:
        raise refused(f"{file}: {name}", f"a bool whose byte is {largest}, which a checkpoint does not hold")

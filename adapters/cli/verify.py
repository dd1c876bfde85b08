"""`trainfold verify CKPT`: reads every byte, compares every digest and header, and computes every fingerprint."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import attrs
import xxhash

from trainfold.adapters.cli.inspect import file_rows, files_of
from trainfold.adapters.cli.locate import Checkpoint, narrowed, open_checkpoint
from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.adapters.cli.terminal.reading import Advance, reading
from trainfold.backends.formats.native.header_check import HeaderCheck
from trainfold.backends.gc_pause import without_collecting
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, TrainfoldError
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.fingerprint import recorded_fingerprint
from trainfold.core.format.manifest import PIECE_BYTES, ComponentRecord, FileRecord, Manifest, ShardRecord
from trainfold.core.leaf_path import component_of_leaf
from trainfold.core.problem import Problem, error_from, problem_of

_CHUNK_BYTES = 16 << 20  # whole pieces
Held: TypeAlias = list[tuple[ShardRecord, str]]
"""Shards, each with its leaf."""
Segment: TypeAlias = tuple[int, int, Held]
"""First byte, one past the last, and the shards that are these bytes."""
_FIX = "use an older checkpoint of the run, and check the disk"


@without_collecting
def verify_checkpoint(path: Path, *, contents: bool = False, components: Sequence[str] | None = None) -> Answer:
    """Read all files of a checkpoint, and those of others that it refers to; compare them with the digests in its manifest, and compute its fingerprints from these.

    It finds what a load would refuse: also a header of a file that does not fit the manifest, although the file has its digest.

    Args:
        path: of the checkpoint, or of a run.
        contents: whether to show fingerprints that do not depend on how ranks cut the tensors, too. Undamaged tensors are read once more.
        components: whose files are read; None for all.

    Returns:
        The result for each file and component, with the first problem as the error.

    Raises:
        CheckpointError: the matching subclass, if there is no manifest to compare with, or files are missing.
        UnknownComponent: for a name that it does not know.
    """
    checkpoint = open_checkpoint(path)
    chosen = narrowed(checkpoint.manifest, components)
    files, names = files_of(chosen), {each.name for each in chosen.components}
    problems: list[Problem] = []
    statuses: dict[str, str] = {}
    headers = HeaderCheck(checkpoint.store, checkpoint.name, checkpoint.manifest)
    damaged: set[str] = set()  # components with a damaged file
    shards = _shards_by_file(checkpoint.manifest)
    with reading("verifying", sum(file.size_bytes for file in files)) as advance:
        for index, file in enumerate(checkpoint.manifest.files):
            if names.isdisjoint(file.components):
                continue
            found = _verify_file(checkpoint, file, shards.get(index, []), advance)
            damaged |= _hurt_by(found, file, checkpoint)
            if not found and (found := _verify_header(headers, index)):
                damaged |= {*file.components}
            problems += found
            statuses[file.label] = "damaged" if found else "verified"
    checked = []
    for component in chosen.components:
        wrong = _verify_fingerprint(checkpoint, component)
        wrong += [] if component.name in damaged else _verify_shared(checkpoint, component)
        problems += wrong
        status = "wrong" if wrong else "damaged" if component.name in damaged else "verified"
        checked.append((component.name, component.fingerprint, status))
    sums: dict[str, str] = {}
    if contents and not problems:
        from trainfold.backends.formats.native.contents import content_fingerprints

        sums = content_fingerprints(checkpoint.store, checkpoint.name, chosen)
    data = {
        "checkpoint": checkpoint.url,
        "verified": not problems,
        "size_bytes": sum(each.size_bytes for each in files if not each.checkpoint),
        "files": [{"name": each.label, "digest": each.digest, "status": statuses[each.label]} for each in files],
        "components": [
            {"name": name, "fingerprint": text, "status": status, **({"contents": sums[name]} if sums else {})}
            for name, text, status in checked
        ],
        "problems": [attrs.asdict(problem) for problem in problems],
    }
    bad = {name for name, status in statuses.items() if status != "verified"}
    rows = [("manifest.json", "", "of itself", "verified")]
    rows += [(*row, statuses.get(row[0], "verified")) for row in file_rows(files, damaged=bad)]
    tables = [
        Table(checkpoint.url, ("file", "size", "digest", "status"), tuple(rows)),
        Table("Components", ("component", "fingerprint", "status"), tuple(checked)),
    ]
    if sums:
        tables.append(Table("Contents, however they are cut", ("component", "fingerprint"), tuple(sums.items())))
    if problems:
        tables.append(Table("Damaged", ("where", "expected", "found"), tuple(map(_row, problems))))
    return Answer(data, tuple(tables), error_from(problems[0]) if problems else None)


def _shards_by_file(manifest: Manifest) -> dict[int, Held]:
    """File -> the shards in it, each with its leaf."""
    found: dict[int, Held] = {}
    for component in manifest.components:
        for record in chain.from_iterable(component.tensors):
            for shard in record.shards:
                found.setdefault(shard.file, []).append((shard, record.path))
    return found


def _verify_file(checkpoint: Checkpoint, file: FileRecord, shards: Held, advance: Advance) -> list[Problem]:
    """The problems of one file: the leaves whose bytes differ, and the file itself."""
    whole = xxhash.xxh3_128()
    name = file.path(checkpoint.name)
    where = f"{checkpoint.store.url}/{name}"
    problems: list[Problem] = []

    def read(start: int, stop: int) -> memoryview:
        data = checkpoint.store.read(name, start=start, stop=stop)
        whole.update(data)
        advance(len(data))
        return memoryview(data)

    try:
        for start, stop, held in _grouped(_segments(shards, file.size_bytes)):
            if stop - start <= _CHUNK_BYTES:
                data = read(start, stop) if start < stop else memoryview(b"")
                for low, high, here in held:
                    part = data[low - start : high - start]
                    problems += _compared(
                        where, here, xxhash.xxh3_128(part), _of_pieces(part) if _has_pieces(here) else ""
                    )
                continue
            digest, pieces = xxhash.xxh3_128(), ""
            for low in range(start, stop, _CHUNK_BYTES):
                data = read(low, min(low + _CHUNK_BYTES, stop))
                digest.update(data)
                pieces += _of_pieces(data) if _has_pieces(held[0][2]) else ""
            problems += _compared(where, held[0][2], digest, pieces)
    except TrainfoldError as error:
        return [problem_of(error)]
    if _text(whole) != file.digest:
        problems.insert(0, _damaged(where, file.digest, _text(whole)))
    return problems


def _hurt_by(problems: list[Problem], file: FileRecord, checkpoint: Checkpoint) -> set[str]:
    """The components of the leaves whose bytes differ; all that a file holds if it differs elsewhere."""
    where = f"{checkpoint.store.url}/{file.path(checkpoint.name)}: "
    leaves = [each.where.removeprefix(where) for each in problems if each.where.startswith(where)]
    return {*map(component_of_leaf, leaves)} or ({*file.components} if problems else set())


def _has_pieces(held: Held) -> bool:
    return any(shard.pieces for shard, _ in held)


def _compared(where: str, held: Held, digest: "xxhash.xxh3_128", pieces: str) -> list[Problem]:
    """The leaves whose digests are not those of the bytes."""
    problems, found = [], _text(digest)
    for shard, path in held:
        if shard.digest != found:
            problems.append(_damaged(f"{where}: {path}", shard.digest, found))
        elif shard.pieces and shard.pieces != pieces:  # a load of a part of it compares these
            problems.append(_damaged(f"{where}: {path}", "the digests of its pieces", "others in the index"))
    return problems


def _verify_header(headers: HeaderCheck, index: int) -> list[Problem]:
    """The problem of a file whose bytes are those of its digest, if its header does not fit the manifest: a load refuses it."""
    try:
        headers.check([index])
    except TrainfoldError as error:
        return [_damaged(error.where, str(error.expected), str(error.found))]
    return []


def _computed(manifest: Manifest, component: ComponentRecord) -> str:
    if manifest.head.schema_version == 1:
        return recorded_fingerprint(component.name, component.nodes, component.tensors)
    from trainfold.core.format.indexes.contributions import fingerprint_in

    return fingerprint_in(component, manifest)


def _verify_fingerprint(checkpoint: Checkpoint, component: ComponentRecord) -> list[Problem]:
    """The problem of a component's fingerprint, if it is not that of its leaves. Their digests are compared with the bytes elsewhere."""
    where = f"{checkpoint.url}/{MANIFEST}: fingerprint of {component.name}"
    try:
        computed = _computed(checkpoint.manifest, component)
    except TrainfoldError as error:
        return [problem_of(error)]
    if computed == component.fingerprint:
        return []
    expected = f"that of its leaves, {computed}"
    return [problem_of(CheckpointHostile(where, expected=expected, found=component.fingerprint, fix=_FIX))]


def _verify_shared(checkpoint: Checkpoint, component: ComponentRecord) -> list[Problem]:
    """The problems of tensors that several ranks wrote: the digest of all of it counts in the fingerprint. The bytes of each part are verified."""
    problems = []
    for record in (record for table in component.tensors for record in table if len(record.shards) > 1):
        if record.whole_digest:
            whole = xxhash.xxh3_128()
            for shard in record.shards:
                name = checkpoint.manifest.files[shard.file].path(checkpoint.name)
                for low in range(shard.start, shard.stop, _CHUNK_BYTES):
                    whole.update(checkpoint.store.read(name, start=low, stop=min(low + _CHUNK_BYTES, shard.stop)))
            if _text(whole) != record.whole_digest:
                where = f"{checkpoint.url}/{MANIFEST}: digest of {record.path}"
                wrong = CheckpointHostile(where, expected=_text(whole), found=record.whole_digest, fix=_FIX)
                problems.append(problem_of(wrong))
    return problems


def _grouped(segments: Iterable[Segment]) -> Iterator[tuple[int, int, list[Segment]]]:
    """Runs of segments that are read at once: as many as fit into a chunk, or a single one that does not."""
    group: list[Segment] = []
    for segment in segments:
        if group and segment[1] - group[0][0] > _CHUNK_BYTES:
            yield group[0][0], group[-1][1], group
            group = []
        group.append(segment)
    if group:
        yield group[0][0], group[-1][1], group


def _segments(shards: Held, size_bytes: int) -> Iterator[Segment]:
    """Cut a file where tensors begin and end, so that one pass serves the file's digest and theirs."""
    held: dict[tuple[int, int], Held] = {}
    for shard, path in shards:
        held.setdefault((shard.start, shard.stop), []).append((shard, path))
    end = 0
    for (start, stop), here in sorted(held.items(), key=lambda item: item[0]):
        if start > end:
            yield end, start, []
        yield start, stop, here
        end = max(end, stop)
    if end < size_bytes:
        yield end, size_bytes, []


def _damaged(where: str, expected: str, found: str) -> Problem:
    return problem_of(CheckpointDamaged(where, expected=expected, found=found, fix=_FIX))


def _of_pieces(data: memoryview) -> str:
    """The digests of a run of whole pieces, of which the last one may be shorter, as a `ShardRecord` has them."""
    return "".join(xxhash.xxh3_128_hexdigest(data[low : low + PIECE_BYTES]) for low in range(0, len(data), PIECE_BYTES))


def _text(digest: "xxhash.xxh3_128") -> str:
    return f"xxh3:{digest.hexdigest()}"


def _row(problem: Problem) -> tuple[str, ...]:
    return problem.where, problem.expected, problem.found

"""`trainfold inspect CKPT`: the contents of a checkpoint, from its manifest alone."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs

from trainfold.adapters.cli.locate import narrowed, open_checkpoint
from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.backends.gc_pause import without_collecting
from trainfold.core.format.leaf_texts import labelled
from trainfold.core.format.manifest import ComponentRecord, FileRecord, Manifest, TensorRecord
from trainfold.core.format.structure.places import places
from trainfold.core.printable import bytes_text
from trainfold.core.state.audit import UNSAVED, unsaved_of
from trainfold.core.state.notes import FROZEN_LIST, ORDERS, RATES

NOT_SAVED = "Not saved, and changed with training"
_SHOWN_SCALARS = 60
_NOT_SHOWN = (UNSAVED, RATES, ORDERS, FROZEN_LIST)
_LISTED_FILES = 8
_WRITTEN_BITS = 4096


@without_collecting
def inspect_checkpoint(path: Path, *, tensors: bool = False, components: Sequence[str] | None = None) -> Answer:
    """Describe a checkpoint.

    Args:
        path: of the checkpoint, or of a run.
        tensors: whether the tables list every tensor; the JSON always does.
        components: of which components; None for all.

    Returns:
        The description.

    Raises:
        CheckpointError: the matching subclass, if there is no checkpoint that can be used.
        UnknownComponent: for a name that it does not know.
    """
    checkpoint = open_checkpoint(path)
    manifest = narrowed(checkpoint.manifest, components)
    files = files_of(manifest)
    scalars = [
        (leaf.path, leaf.value)
        for component in manifest.components
        for part, node in enumerate(component.nodes)
        for leaf in places(node, labelled(component, part))
        if leaf.tensor is None
    ]
    head = attrs.asdict(manifest.head)
    facts = {**{name: _text(value) for name, value in head.items()}, "world_size": str(manifest.world_size)}
    facts |= {f"{library} version": version for library, version in manifest.versions.items()}
    facts |= {"left out": ", ".join(manifest.omitted)} if manifest.omitted else {}
    refers = manifest.summary.refers
    facts |= {"refers to": ", ".join(refers)} if refers else {}
    tables = [
        Table(checkpoint.url, ("", ""), tuple(facts.items())),
        Table(
            "Components",
            ("component", "tensors", "size", "fingerprint"),
            tuple(
                (each.name, str(sum(map(len, each.tensors))), bytes_text(_size(each)), each.fingerprint)
                for each in manifest.components
            ),
        ),
        Table(
            "Files",
            ("file", "size", "digest"),
            tuple(file_rows(files)),
        ),
        Table("Values", ("leaf", "value"), _shortened(scalars)),
        Table(
            "Contract",
            ("key", "value"),
            tuple((key, _text(value)) for key, value in manifest.contract.items() if key not in _NOT_SHOWN),
        ),
    ]
    unsaved = unsaved_of(manifest.contract)
    if unsaved:
        tables.append(Table(NOT_SAVED, ("attribute", "what it holds"), tuple(unsaved.items())))
    if tensors:
        tables.append(Table("Tensors", ("leaf", "dtype", "shape", "bytes", "file"), tuple(_tensor_rows(manifest))))
    data = {
        "checkpoint": checkpoint.url,
        "head": head,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "omitted": list(manifest.omitted),
        "contract": dict(manifest.contract),
        "unsaved": unsaved,
        "files": [attrs.asdict(file) for file in files],
        "refers": list(manifest.summary.refers),
        "components": [_component_json(component) for component in manifest.components],
        "values": {name: _jsonable(value) for name, value in scalars},
    }
    return Answer(data, tuple(tables))


def files_of(manifest: Manifest) -> list[FileRecord]:
    """The files of the components that a manifest has."""
    names = {each.name for each in manifest.components}
    return [file for file in manifest.files if not names.isdisjoint(file.components)]


def file_rows(files: Sequence[FileRecord], *, damaged: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Name, size and digest of each file; many ranks write many files, so those of the same components share a row if they are more than a few.

    Args:
        files: of a checkpoint.
        damaged: names of files that have a row of their own.
    """
    sound = [file for file in files if file.label not in damaged]
    counts, sizes = Counter(map(_group, sound)), Counter[str]()
    for file in sound:
        sizes[_group(file)] += file.size_bytes
    rows: dict[str, tuple[str, str, str]] = {}
    for file in files:
        if file.label in damaged or counts[_group(file)] <= _LISTED_FILES:
            rows[file.label] = (file.label, bytes_text(file.size_bytes), file.digest)
        else:
            title = f"{_group(file)}: {counts[_group(file)]} files"
            rows[title] = (title, bytes_text(sizes[_group(file)]), "each in --json")
    return list(rows.values())


def _group(file: FileRecord) -> str:
    """What files that share a row have in common: the components, and the checkpoint if it is another one."""
    held = ", ".join(file.components)
    return f"{file.checkpoint}/{held}" if file.checkpoint else held


def _shortened(scalars: list[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    rows = [(path, _text(value)) for path, value in scalars]
    rest = len(rows) - _SHOWN_SCALARS
    return tuple(rows) if rest <= 0 else (*rows[:_SHOWN_SCALARS], ("...", f"{rest} more: see --json"))


def _tensor_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    return [
        (
            labelled(component, part) + record.path.removeprefix(component.name),
            record.dtype,
            str(list(record.shape)),
            str(_record_size(record)),
            " ".join(dict.fromkeys(manifest.files[shard.file].label for shard in record.shards)),
        )
        for component in manifest.components
        for part, table in enumerate(component.tensors)
        for record in table
    ]


def _component_json(component: ComponentRecord) -> dict[str, Any]:
    return {
        "name": component.name,
        "fingerprint": component.fingerprint,
        "size_bytes": _size(component),
        "tensors": [[_record_json(record) for record in table] for table in component.tensors],
    }


def _record_json(record: TensorRecord) -> dict[str, Any]:
    shards = [
        {"file": each.file, "start": each.start, "stop": each.stop, "box": each.box, "digest": each.digest}
        for each in record.shards
    ]
    placement = None if record.placement is None else attrs.asdict(record.placement)
    return {
        "path": record.path, "dtype": record.dtype, "shape": record.shape, "shards": shards, "placement": placement
    }  # fmt: skip


def _size(component: ComponentRecord) -> int:
    return sum(_record_size(record) for table in component.tensors for record in table)


def _record_size(record: TensorRecord) -> int:
    return sum(shard.stop - shard.start for shard in record.shards)


def _text(value: object) -> str:
    if type(value) is int and value.bit_length() > _WRITTEN_BITS:
        return hex(value)  # Python refuses to write out thousands of decimal digits
    return "" if type(value) is tuple and not value else str(value)


def _jsonable(value: object) -> object:
    if type(value) is int and value.bit_length() > _WRITTEN_BITS:
        return hex(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)

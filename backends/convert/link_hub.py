"""`link_to_hub`: a checkpoint as a directory of a model hub whose files are those of the checkpoint, under second names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainfold.backends.convert.linked_files import LinkedDirectory, NamedFile, link_directory
from trainfold.backends.convert.opened_source import OpenedSource
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_files import HubFiles
from trainfold.backends.weights.hub_writer import plan_hub_directory
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.manifest import Manifest, TensorRecord
from trainfold.core.layout.slices import whole_box
from trainfold.core.state.names.tensor_names import storage_key
from trainfold.core.weights.hub.file_header import HUB_DTYPES
from trainfold.core.weights.hub.hub_plan import HUB_INDEX

_ONE_FILE: Final = "model.safetensors"


def link_to_hub(
    opened: OpenedSource,
    target: str | Path,
    *,
    like: HubDirectory | HubFiles | None,
    config: Mapping[str, Any] | None,
    dry_run: bool,
) -> LinkedDirectory:
    """Show the model of a checkpoint as a directory of a hub, without a copy of its tensors.

    Args:
        opened: a checkpoint.
        target: the directory, which does not exist yet.
        like: the directory of the original, for what is beside the weights.
        config: what is in ``config.json``, if there is no original.
        dry_run: whether nothing is made.

    Raises:
        InvalidArgument: if the files of the checkpoint are not files of a hub; the message says why.
        SaveFailed: if they cannot be linked, as to another filesystem.
    """
    assert opened.checkpoint is not None, "the caller knows"
    manifest, store = opened.checkpoint.manifest, opened.checkpoint.store
    records = _records(opened, manifest)
    plan = plan_hub_directory(opened.model, like=like, config=None if like is not None else config, shard_bytes=2**62)
    wanted = {name for file in plan.files for name in file.tensors}
    if wanted != records.keys():
        differ = sorted(wanted ^ records.keys())
        raise refused(
            opened.where,
            f"{', '.join(differ[:4])} under {'other names' if len(differ) > 1 else 'another name'} in a directory of this configuration",
        )
    used = sorted({record.shards[0].file for record in records.values()})
    names = (
        [f"model-{number:05d}-of-{len(used):05d}.safetensors" for number in range(1, len(used) + 1)]
        if len(used) > 1
        else [_ONE_FILE]
    )
    files = [
        NamedFile(
            name, f"{store.url}/{manifest.files[index].path(opened.checkpoint.name)}", manifest.files[index].size_bytes
        )
        for name, index in zip(names, used, strict=True)
    ]
    beside = {name: data for name, data in plan.beside.items() if name != HUB_INDEX}
    if len(used) > 1:
        where = {name: names[used.index(record.shards[0].file)] for name, record in sorted(records.items())}
        total = sum(record.shards[0].stop - record.shards[0].start for record in records.values())
        beside[HUB_INDEX] = (
            json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
        ).encode()
    return link_directory(target, files, beside, dry_run=dry_run)


def _records(opened: OpenedSource, manifest: Manifest) -> dict[str, TensorRecord]:
    """Name -> the tensor, each of which is whole in one file, under its name, in the form that hubs have."""
    component = manifest.component("model")
    if component is None or component.is_own:
        raise refused(opened.where, "no model that all ranks have in common")
    found: dict[str, TensorRecord] = {}
    for record in component.tensors[0]:
        name = storage_key(record.path)
        if len(record.shards) != 1 or record.shards[0].box != whole_box(record.shape):
            raise refused(opened.where, f"{name} in parts of several ranks")
        if manifest.files[record.shards[0].file].components != ("model",):
            raise refused(opened.where, f"{name} in a file with other components")
        if manifest.files[record.shards[0].file].checkpoint:
            raise refused(
                opened.where,
                f"{name} in a file of an earlier checkpoint, which may hold other tensors that have changed since",
            )
        if name == record.path:
            raise refused(opened.where, f"{record.path} under another name in its file")
        if HUB_DTYPES.get(record.dtype) != STORED[record.dtype].name:
            raise refused(opened.where, f"{name} of dtype {record.dtype}, which hubs store in another form")
        found[name] = record
    return found


def refused(where: str, found: str) -> InvalidArgument:
    """The error for what cannot be shown in another format without a copy."""
    return InvalidArgument(where, expected="files that are the same in both formats", found=found,
                           fix="copy the tensors: trainfold convert takes the same arguments, and --to")  # fmt: skip

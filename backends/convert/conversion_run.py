"""`plan_conversion` and `run_conversion`: between the formats, a tensor at a time. What `--dry-run` prints is what is carried out."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.convert.native_target import NativeContents, ReadLeaf, write_native
from trainfold.backends.convert.opened_source import NativeCheckpoint, OpenedSource, read_json
from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.backends.stores.place import local_path
from trainfold.backends.weights.checkpoint import name_in
from trainfold.backends.weights.transformed import Transformed
from trainfold.core.component_names import in_order
from trainfold.core.errors import CheckpointMissing, InvalidArgument, InvalidState
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.described import Described
from trainfold.core.json_values import Json
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import whole_box
from trainfold.core.resume.reads import ComponentReads, tensor_reads
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.notes import CONVERTED
from trainfold.core.state.state import ModelState
from trainfold.core.transform.conversion import Conversion, transform_for
from trainfold.core.transform.expression import Read
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.source import ReadableSource

_CONFIG_BYTES: Final = 16 << 20
_RUN_HAS: Final = ("optimizer", "trainer")  # what a full resume always needs

Advance = Callable[[int], None]


@final
@attrs.frozen
class PlannedConversion:
    """A conversion that can be carried out.

    Attributes:
        plan: what it reads and writes, which prints.
        opened: the source.
        model: the source's model, transformed.
        contents: of the checkpoint, if the target is one.
    """

    plan: Conversion
    opened: OpenedSource
    model: ReadableSource
    contents: "Callable[[Advance], NativeContents]"


def plan_conversion(  # noqa: PLR0913 - keywords
    opened: OpenedSource,
    target: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    rules: str | None = None,
    config: str | Path | None = None,
) -> PlannedConversion:
    """Plan a conversion on names, dtypes and shapes; no tensor is read.

    Args:
        opened: what is read.
        target: the path that is written.
        to: ``native``, ``hf`` or ``dcp``.
        dtype: to which floating tensors are cast, such as ``bf16``. The optimizer is left out then: its state is never cast.
        rules: a family of `hub_rules`, if names are translated. The optimizer is left out then.
        config: the ``config.json`` of the model, or its directory. By default the one in the source.

    Raises:
        InvalidArgument: for what cannot be done.
        InvalidState: if the tensors have not the form that the rules need.
    """
    found = _config(opened, config)
    transform = transform_for(opened.format, to, rules=rules, dtype=dtype, config=found)
    model: ReadableSource = opened.model if transform is None else Transformed(opened.model, transform)
    before, after = opened.model.specs(), model.specs()
    if to != "native":
        raise InvalidArgument("convert.to", expected="native", found=to, fix="this target comes later")

    def contents(advance: Advance) -> NativeContents:
        if opened.checkpoint is not None and transform is None:
            return _copied(opened, opened.checkpoint, advance)
        return _of_model(opened, model, transform, advance, keeps_names=rules is None)

    first = contents(lambda _: None)
    files = {file.name: file.size_bytes for file in first.plan.files}
    plan = Conversion(
        opened.where, opened.format, str(target), to, opened.step, "" if transform is None else str(transform),
        before, after, tuple(first.described), first.omitted, files,
    )  # fmt: skip
    return PlannedConversion(plan, opened, model, contents)


def run_conversion(planned: PlannedConversion, *, advance: Advance = lambda _: None) -> str:
    """Carry out a conversion. A killed one goes on where it stopped if it is run again, and until the end nothing is at the target that can be taken for whole.

    Args:
        planned: from `plan_conversion`.
        advance: called with the number of bytes of each tensor that was read.

    Returns:
        What was written: a path.

    Raises:
        CheckpointError: the matching subclass, if something cannot be read or written.
        InvalidArgument: if there is something else at the target.
    """
    target = local_path(planned.plan.target)
    return f"{target}/{write_native(planned.contents(advance), target)}"


def _config(opened: OpenedSource, config: str | Path | None) -> Mapping[str, object] | None:
    if config is None:
        beside = Path(local_path(opened.where)) / "config.json"
        return read_json(beside, limit_bytes=_CONFIG_BYTES) or None
    place = Path(local_path(str(config)))
    place = place / "config.json" if place.is_dir() else place
    found = read_json(place, limit_bytes=_CONFIG_BYTES)
    if not found:
        raise CheckpointMissing(
            str(place),
            expected="the config.json of a model",
            found="no JSON object",
            fix="name the file, or its directory",
        )
    return found


def _noted(opened: OpenedSource, transform: Transform | None, contract: Mapping[str, Json]) -> dict[str, Json]:
    """The contract with a note of where the checkpoint comes from. The name of the path is enough: where it was says nothing elsewhere."""
    note = {
        "from": opened.format,
        "name": Path(opened.where).name,
        "transforms": "" if transform is None else str(transform),
    }
    return {**contract, CONVERTED: note}


def _copied(opened: OpenedSource, checkpoint: NativeCheckpoint, advance: Advance) -> NativeContents:
    """All components of a checkpoint that its ranks have in common, as they are."""
    manifest = checkpoint.manifest
    reader = PlanReader(checkpoint.store, checkpoint.name, manifest)
    shared = [each for each in manifest.components if not each.is_own]
    omitted = {*manifest.omitted, *(each.name for each in manifest.components if each.is_own)}
    described = {
        each.name: Described(
            each.nodes[0], {record.path: LeafSpec(record.dtype, record.shape) for record in each.tensors[0]}
        )
        for each in shared
    }
    read = {
        each.name: {
            record.path: _stored(reader, each.tensors[0], index, advance)
            for index, record in enumerate(each.tensors[0])
        }
        for each in shared
    }
    return NativeContents(
        manifest.head.step,
        described,
        read,
        tuple(in_order(omitted)),
        _noted(opened, None, manifest.contract),
        opened.identity,
    )


def _stored(reader: PlanReader, table: Any, index: int, advance: Advance) -> ReadLeaf:
    def read() -> torch.Tensor:
        path = table[index].path
        found = reader.read(ComponentReads({}, tensor_reads(table, {index: (path, None)})), {})[index]
        advance(found.nbytes)
        return found

    return read


def _of_model(
    opened: OpenedSource, model: ReadableSource, transform: Transform | None, advance: Advance, *, keeps_names: bool
) -> NativeContents:
    """The model alone: of another format, or with other names or dtypes."""
    specs = model.specs()
    manifest = None if opened.checkpoint is None else opened.checkpoint.manifest
    known = manifest if keeps_names else None
    described, names = _of_checkpoint(known, specs) if known is not None else _of_names(specs)
    read: list[Read] = []

    def whole(name: str) -> ReadLeaf:
        def leaf() -> torch.Tensor:
            if not read:
                read.append(model.reader())
            found = read[0](name, whole_box(specs[name].shape))
            advance(found.nbytes)
            return found

        return leaf

    omitted = {*_RUN_HAS, *opened.others, *(() if manifest is None else manifest.omitted)} - {"model"}
    leaves = {path: whole(name) for path, name in names.items()}
    return NativeContents(
        opened.step or 0,
        {"model": described},
        {"model": leaves},
        tuple(in_order(omitted)),
        _noted(opened, transform, {}),
        opened.identity,
    )


def _of_names(specs: Mapping[str, LeafSpec]) -> tuple[Described, dict[str, str]]:
    """A model with these parameters, and path -> name. What a hub has says nothing of buffers, so all of them are parameters."""
    described, _ = describe(ModelState(Leaves({}), Leaves({})), "model")
    node: Any = described.node
    node["fields"]["params"]["leaves"] = {name: {"t": number} for number, name in enumerate(specs)}
    paths = {f"model.params[{name!r}]": name for name in specs}
    return Described(node, {path: specs[name] for path, name in paths.items()}), paths


def _of_checkpoint(manifest: Manifest, specs: Mapping[str, LeafSpec]) -> tuple[Described, dict[str, str]]:
    """The model of a checkpoint with other dtypes, and path -> name: parameters, buffers and ties stay what they are."""
    component = manifest.component("model")
    assert component is not None, "it has supplied the specs"
    names = {record.path: name_in(record) for record in component.tensors[0]}
    if set(names.values()) != specs.keys():
        raise InvalidState("model", expected="parameters and buffers by name", found=f"{len(names)} tensors with {len(specs)} names",
                           fix="leave out --dtype: the component is copied as it is")  # fmt: skip
    return Described(component.nodes[0], {path: specs[name] for path, name in names.items()}), names

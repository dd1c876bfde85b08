"""`contents_of_checkpoint` and `contents_of_weights`: what a new checkpoint will hold: all of another one, or a model that is read from anywhere."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from trainfold.backends.convert.native_target import NativeContents, ReadLeaf
from trainfold.backends.convert.opened_source import NativeCheckpoint, OpenedSource
from trainfold.backends.formats.native.plan_reader import PlanReader
from trainfold.core.component_names import in_order
from trainfold.core.digest import digest_of
from trainfold.core.format.manifest import TensorRecord
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.described import Described
from trainfold.core.json_values import Json, canonical_json
from trainfold.core.layout.leaf_spec import leaf_specs
from trainfold.core.resume.reads import ComponentReads, tensor_reads
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.notes import CONVERTED
from trainfold.core.state.state import ModelState
from trainfold.core.transform.apply import is_made_of, table_of
from trainfold.core.transform.expression import Expression, computed_whole
from trainfold.core.transform.families.tied_heads import with_aliases
from trainfold.core.transform.transform import Transform, compose
from trainfold.core.transform.values import cast
from trainfold.core.weights.open_weights import OpenWeights

_RUN_HAS: Final = ("optimizer", "trainer")  # what a full resume always needs

Advance = Callable[[int], None]
"""Called with the number of bytes of each tensor that was read."""


def contents_of_checkpoint(opened: OpenedSource, checkpoint: NativeCheckpoint, advance: Advance) -> NativeContents:
    """All components of a checkpoint that its ranks have in common, as they are. What each rank has of its own is left out.

    Args:
        opened: the source.
        checkpoint: of it.
        advance: called for each tensor.
    """
    manifest = checkpoint.manifest
    reader = PlanReader(checkpoint.store, checkpoint.name, manifest)
    shared = [each for each in manifest.components if not each.is_own]
    omitted = {*manifest.omitted, *(each.name for each in manifest.components if each.is_own)}
    return NativeContents(
        manifest.head.step,
        {each.name: Described(each.nodes[0], leaf_specs({record.path: record for record in each.tensors[0]})) for each in shared},
        {each.name: _stored(reader, each.tensors[0], advance) for each in shared},
        tuple(in_order(omitted)),
        {**manifest.contract, CONVERTED: _note(opened, "")},
        digest_of(canonical_json([manifest.summary.fingerprints, [each.digest for each in manifest.files]])),
    )  # fmt: skip


def _stored(reader: PlanReader, table: Sequence[TensorRecord], advance: Advance) -> ReadLeaf:
    index_of = dict[str, int]()  # a plan reads nothing

    def read(path: str) -> torch.Tensor:
        if not index_of:
            index_of.update((each.path, index) for index, each in enumerate(table))
        index = index_of[path]
        found = reader.read(ComponentReads({}, tensor_reads(table, {index: (table[index].path, None)})), {})[index]
        advance(found.nbytes)
        return found

    return read


def contents_of_weights(
    opened: OpenedSource, weights: OpenWeights, rules: Transform | None, dtype: str | None, advance: Advance
) -> NativeContents:
    """A model alone, with other names or dtypes, or from another format.

    What the source knows as buffers keeps its dtype. Where rules are applied, tied tensors are stored under each of their names; otherwise once, as in the source.

    Args:
        opened: the source.
        weights: its model.
        rules: for the names; None for none.
        dtype: to which floating parameters are cast; None for none.
        advance: called for each tensor.
    """
    table = model_table(weights, rules, dtype)
    buffers = (
        {name: each for name, each in table.items() if is_made_of(each, weights.buffers)} if weights.buffers else {}
    )
    params = {name: each for name, each in table.items() if name not in buffers} if buffers else table
    described, names = _described(params, buffers, {} if rules is not None else weights.ties)
    others = () if opened.checkpoint is None else opened.checkpoint.manifest.omitted
    omitted = {*_RUN_HAS, *opened.others, *others} - {"model"}
    said = "\n".join(str(each) for each in (rules, None if dtype is None else cast(dtype)) if each is not None)

    def read(path: str) -> torch.Tensor:
        found = computed_whole(table[names[path]], weights.read)
        advance(found.nbytes)
        return found

    return NativeContents(
        opened.step or 0,
        {"model": described},
        {"model": read},
        tuple(in_order(omitted)),
        {CONVERTED: _note(opened, said)},
        digest_of(canonical_json([weights.identity, said])),
        weights.check,
    )


def model_table(weights: OpenWeights, rules: Transform | None, dtype: str | None) -> dict[str, Expression]:
    """What each tensor of the result is made of."""
    table = table_of(compose(), weights.specs)
    if rules is not None:
        table = rules.on(with_aliases(table, weights.ties, rules))
    if dtype is None:
        return table
    return {
        name: table[name] if is_made_of(table[name], weights.buffers) else each
        for name, each in cast(dtype).on(table).items()
    }


def _described(
    params: Mapping[str, Expression], buffers: Mapping[str, Expression], ties: Mapping[str, str]
) -> tuple[Described, dict[str, str]]:
    """A model with these tensors, and leaf path -> name."""
    described, _ = describe(ModelState(Leaves({}), Leaves({}), tuple(ties.items())), "model")
    node: Any = described.node
    names = [*params, *buffers]
    paths = [f"model.params[{name!r}]" for name in params] + [f"model.buffers[{name!r}]" for name in buffers]
    for field, table, first in (("params", params, 0), ("buffers", buffers, len(params))):
        node["fields"][field]["leaves"] = {name: {"t": number} for number, name in enumerate(table, first)}
    # equal specs are one object, which a plan makes use of
    specs = leaf_specs(dict(zip(paths, chain(params.values(), buffers.values()), strict=True)))
    return Described(node, specs), dict(zip(paths, names, strict=True))


def _note(opened: OpenedSource, transforms: str) -> dict[str, Json]:
    """Where a checkpoint comes from. The name of the path is enough: where it was means nothing elsewhere."""
    return {"from": opened.format, "name": Path(opened.where).name, "transforms": transforms}

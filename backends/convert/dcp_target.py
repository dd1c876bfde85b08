"""`dcp_contents` and `write_dcp_contents`: a model, with the optimizer and the step of a checkpoint, as `torch.distributed.checkpoint` has them."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.convert.native_contents import Advance, contents_of_checkpoint, model_table
from trainfold.backends.convert.opened_source import OpenedSource
from trainfold.backends.formats.dcp.dcp_writer import write_dcp
from trainfold.backends.formats.native.later_leaf import LaterLeaf
from trainfold.backends.weights.foreign.dcp_optimizer import optimizer_entries
from trainfold.core.component_names import in_order
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidState
from trainfold.core.format.manifest import ComponentRecord
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.leaf_spec import LeafSpec, leaf_specs
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.dcp_plan import DcpPlan, plan_dcp
from trainfold.core.transform.expression import computed_whole
from trainfold.core.transform.families.tied_heads import with_aliases
from trainfold.core.transform.transform import Transform
from trainfold.core.weights.open_weights import OpenWeights

_MODEL: Final = "model"
_OPTIMIZER: Final = "optim"  # as torch.distributed.checkpoint.state_dict has them
_STEP: Final = "step"


@final
@attrs.frozen
class DcpContents:
    """What a directory will hold.

    Attributes:
        plan: the files.
        specs: name -> dtype and shape of each tensor.
        read: reads a tensor, by its name.
        components: what it has of a run.
        left_out: what the source has and it has not.
        reasons: component -> why it is left out, where torch has no form for it.
        identity: of the values.
    """

    plan: DcpPlan
    specs: Mapping[str, LeafSpec] = attrs.field(repr=False)
    read: Callable[[str], torch.Tensor] = attrs.field(repr=False)
    components: tuple[str, ...]
    left_out: tuple[str, ...]
    reasons: Mapping[str, str]
    identity: str


def dcp_contents(
    opened: OpenedSource, weights: OpenWeights, rules: Transform | None, dtype: str | None, advance: Advance
) -> DcpContents:
    """Plan a directory. The optimizer comes along if nothing is renamed or cast, and the step if the source says it.

    Args:
        opened: the source.
        weights: its model.
        rules: for the names of the model; None for none.
        dtype: to which floating parameters are cast; None for none.
        advance: called for each tensor that is read.
    """
    table = model_table(weights, rules, dtype)
    if rules is None:
        table = with_aliases(table, weights.ties)
    names = [f"{_MODEL}.{name}" for name in table]
    later = dict[str, LaterLeaf]()  # tensors of the optimizer
    model = dict(zip(names, table.values(), strict=True))

    def read(name: str) -> torch.Tensor:
        if name in later:
            return later[name].read()
        found = computed_whole(model[name], weights.read)
        advance(found.nbytes)
        return found

    paths: dict[str, PathInState] = dict(zip(names, zip(repeat(_MODEL), table, strict=False), strict=True))
    objects: dict[str, Any] = {} if opened.step is None else {_STEP: opened.step}
    components, reasons, identity = [_MODEL], {}, weights.identity
    record = (
        None
        if opened.checkpoint is None or rules is not None or dtype is not None
        else opened.checkpoint.manifest.component("optimizer")
    )
    if record is not None and not record.is_own:
        try:
            for keys, value in optimizer_entries(_with_later(record, opened, advance)):
                name = ".".join(map(str, (_OPTIMIZER, *keys)))
                paths[name] = (_OPTIMIZER, *keys)
                if isinstance(value, LaterLeaf):
                    later[name] = value
                else:
                    objects[name] = value
            components.append("optimizer")
            identity = digest_of(canonical_json([identity, record.fingerprint]))
        except InvalidState as error:  # torch has no name for it
            reasons["optimizer"] = f"{error.found}: {error.expected} are written"
    if "trainer" in opened.others and opened.step is not None:
        reasons["trainer"] = "its step is written, and torch has no form for its samples, tokens and epoch"
    specs = leaf_specs(model) | {name: each.spec for name, each in later.items()}
    plan = plan_dcp(specs, objects, paths=paths)
    left = tuple(in_order(name for name in opened.others if name not in components))
    return DcpContents(plan, specs, read, tuple(components), left, reasons, identity)


def write_dcp_contents(contents: DcpContents, weights: OpenWeights, target: str) -> None:
    """Write the directory. What a killed process has finished of it stays.

    Raises:
        InvalidArgument: if there is something else at the target.
        CheckpointError: the matching subclass, if something cannot be read or written.
    """
    write_dcp(
        contents.plan, lambda name, _: contents.read(name), target, identity=contents.identity, check=weights.check
    )


def _with_later(record: ComponentRecord, opened: OpenedSource, advance: Advance) -> Any:
    """The optimizer of a checkpoint, with what reads a tensor in the place of each."""
    assert opened.checkpoint is not None, "the caller knows"
    read = contents_of_checkpoint(opened, opened.checkpoint, advance).read[record.name]
    table = record.tensors[0]
    return rebuild(
        record.nodes[0],
        record.name,
        lambda index, _: LaterLeaf(table[index].path, table[index].spec, partial(read, table[index].path)),
    )

"""`write_hub_directory` and `plan_hub_directory`: a directory that model hubs and `from_pretrained` read, streamed tensor by tensor."""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.backends.formats.file_sections import Section, bytes_from
from trainfold.backends.formats.staged_directory import staged_directory
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_rank_zero
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.side.side_files import SideFiles
from trainfold.backends.stores.direct_io import release_buffers
from trainfold.backends.stores.place import local_path
from trainfold.backends.stores.protocol import Buffer
from trainfold.backends.weights.held_by_ranks import reading_rank_zero
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_files import BESIDE, HubFiles
from trainfold.backends.weights.opened import ReusedMemory, opened_weights, weights_of_state
from trainfold.core.checks import document, mapping_given
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument, InvalidState, SaveFailed
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.json_values import shown
from trainfold.core.layout.leaf_spec import leaf_specs
from trainfold.core.layout.slices import Box, whole_box
from trainfold.core.layout.world import Collectives
from trainfold.core.state.spec import dtype_name
from trainfold.core.state.state import TrainState
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform.apply import is_made_of, table_of
from trainfold.core.transform.expression import Expression
from trainfold.core.transform.families.adapter_rules import adapter_rules, before_base_model, is_of_adapter
from trainfold.core.transform.families.hub_rules import check_experts_apart
from trainfold.core.transform.families.tied_heads import by_convention, tied_by_default, with_aliases
from trainfold.core.transform.transform import Table, Transform, compose, transform_given
from trainfold.core.transform.values import cast
from trainfold.core.weights.hub.file_header import HUB_DTYPES
from trainfold.core.weights.hub.hub_config import HUB_CONFIG, config_of, config_text, is_tied
from trainfold.core.weights.hub.hub_plan import HUB_INDEX, HubFile, HubPlan, hub_index_text, plan_hub_files, shard_size
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import ListedSource

_PIECE_BYTES: Final = 1 << 20
_DOING: Final = "write a hub directory"
_SHARD_BYTES: Final = 5_000_000_000


@final
@attrs.frozen
class _Names:
    """How the files of a directory are called."""

    stem: str = "model"
    config: str = HUB_CONFIG
    adapter: str = ""


@final
@attrs.frozen
class _Work:
    plan: HubPlan
    table: Mapping[str, Expression]
    weights: OpenWeights


_MODEL: Final = _Names()


def write_hub_directory(  # noqa: PLR0913 - keywords
    weights: ListedSource | TrainState,
    path: str | Path,
    *,
    rules: Transform | None = None,
    dtype: Any = None,
    shard_bytes: int | str | None = None,
    like: str | Path | HubDirectory | HubFiles | SideFiles | None = None,
    config: Mapping[str, Any] | None = None,
    about: Mapping[str, str] | None = None,
    collectives: Collectives | None = None,
) -> HubPlan:
    """Write weights as model hubs have them: safetensors files, their index, and what is known of the configuration and the tokenizer.

    Law: the directory is absent until it is whole, whenever the process dies; the same call goes on where it was killed, with at most 256 MB that are written again. Each tensor is in one file. Memory: two of the largest tensor, and buffers; on ranks that give their parts, buffers alone.

    Args:
        weights: a source that lists what it has, such as ``CheckpointWeights(run)``, or a state with a model, such as ``live.capture()``. Of a state that ranks hold in parts, or in
            stages of a pipeline, each rank passes its own: rank 0 gets from the others what it writes, and of what all have its own is written.
        path: the directory, which does not exist yet, is empty, or has the very files that are to be written, which are compared.
        rules: from the names of the weights to those of the hub, as `hub_rules_of` makes them; None if they have these names. Tied weights are given to them under each of their names.
        dtype: to which floating parameters are cast that have another one, as a dtype of torch or its name; None for none. Buffers, integers, booleans and quantised numbers with their scales keep theirs; files of a hub do not say what is a buffer.
        shard_bytes: how large a file may be, such as ``"5GB"``. By default as ``like`` has it, or 5 GB.
        like: the directory of the original: its configuration, tokenizer and other files are copied; and each tensor goes into the file that it has there, unless ``shard_bytes`` is given.
            Or the `HubFiles` or `SideFiles` of a run, which have no weights.
        config: what is to be in ``config.json``; by default that of ``like``. It says whether the head is tied to the embeddings, and so left out.
        about: more texts for the headers of the files, such as ``{"trainfold.step": "120"}``.
        collectives: the ranks, all of which call: rank 0 writes, and all leave together. None for this process alone.

    Returns:
        What was written, and what was left out.

    Raises:
        InvalidArgument: for something else than weights, a part of weights whose other ranks do not call, or if something else is at the path.
        InvalidState: if tensors have not the form that the rules need, weights that are tied differ, numbers would become infinite in another dtype, or weights are written to meanwhile.
        CheckpointMissing: and others, from the source.
        SaveFailed: if the directory cannot be written. On the other ranks it is `RankFailed`.

    Examples:
        >>> import tempfile, torch, trainfold
        >>> state = trainfold.attach(torch.nn.Linear(2, 1)).capture()
        >>> with tempfile.TemporaryDirectory() as top:
        ...     print(write_hub_directory(state, f"{top}/model", config={"model_type": "linear"}))
        ...     sorted(HubDirectory(f"{top}/model").specs())
        model.safetensors: 2 tensors, 172 bytes
        config.json: 29 bytes
        ['bias', 'weight']
    """
    world = ALONE if collectives is None else collectives
    arguments = {
        "rules": rules,
        "dtype": dtype,
        "shard_bytes": shard_bytes,
        "like": like,
        "config": config,
        "about": about,
    }
    return _on_rank_zero(world, weights, path, arguments)


def write_adapter_directory(  # noqa: PLR0913 - keywords
    weights: ListedSource | TrainState,
    path: str | Path,
    *,
    config: Mapping[str, Any],
    adapter: str = "default",
    dtype: Any = None,
    collectives: Collectives | None = None,
) -> HubPlan:
    """Write a LoRA adapter as `peft` has it: ``adapter_model.safetensors`` and ``adapter_config.json``. Everything else in the weights, such as the base, is left out.

    Args:
        weights: of a model of peft, as in `write_hub_directory`, or of a module that has one inside, such as that of Lightning; a checkpoint with the adapter alone will do.
        path: the directory, as there.
        config: of the adapter, such as ``model.peft_config["default"].to_dict()``. Modules of its ``modules_to_save`` are written too.
        adapter: the name that it has in the model.
        dtype: as there.
        collectives: as there.

    Returns:
        What was written, and what was left out.

    Raises:
        InvalidState: if the weights have no tensor of such an adapter, those of two models of peft, or a module that was trained whole and is not of ``modules_to_save``.
        InvalidArgument: if biases were trained too; and others, as from `write_hub_directory`.

    Examples:
        >>> import tempfile, torch, trainfold
        >>> model = torch.nn.ModuleDict({"q": torch.nn.ModuleDict({"lora_A": torch.nn.ModuleDict({"default": torch.nn.Linear(2, 1, bias=False)})})})
        >>> with tempfile.TemporaryDirectory() as top:
        ...     plan = write_adapter_directory(trainfold.attach(model).capture(), f"{top}/adapter", config={"peft_type": "LORA"})
        >>> list(plan.files[0].tensors)
        ['q.lora_A.weight']
    """
    world = ALONE if collectives is None else collectives
    names = _Names("adapter_model", "adapter_config.json", adapter)
    document("config", config, fix="pass what is to be in adapter_config.json: model.peft_config[name].to_dict()")
    rules = adapter_rules(adapter, modules_to_save=config.get("modules_to_save"))
    if config.get("bias", "none") != "none":
        raise InvalidArgument("config.bias", expected='"none"', found=shown(config["bias"]),
                              fix='publish the merged weights: write_hub_directory(..., rules=view(lora_of(config), "export")); the biases that were trained are of the base')  # fmt: skip
    arguments = {"rules": rules, "dtype": dtype, "shard_bytes": None, "like": None, "config": config, "names": names}  # fmt: skip
    return _on_rank_zero(world, weights, path, arguments)


def plan_hub_directory(  # noqa: PLR0913 - keywords
    weights: ListedSource | TrainState,
    *,
    rules: Transform | None = None,
    dtype: Any = None,
    shard_bytes: int | str | None = None,
    like: str | Path | HubDirectory | HubFiles | SideFiles | None = None,
    config: Mapping[str, Any] | None = None,
    about: Mapping[str, str] | None = None,
) -> HubPlan:
    """Say what `write_hub_directory` would write, without reading a tensor.

    Args:
        weights: as there, and so the others.
        rules: see there.
        dtype: see there.
        shard_bytes: see there.
        like: see there.
        config: see there.
        about: see there.

    Raises:
        InvalidArgument: as there.
        InvalidState: as there, but for weights that are tied and differ.
    """
    with ExitStack() as held:
        found = (
            weights_of_state(weights)
            if isinstance(weights, TrainState)
            else held.enter_context(opened_weights(weights))
        )
        return without_collecting(_planned)(
            found, rules=rules, dtype=dtype, shard_bytes=shard_bytes, like=like, config=config, about=about
        ).plan


def _planned(  # noqa: PLR0913 - keywords
    weights: OpenWeights,
    *,
    rules: Transform | None,
    dtype: Any,
    shard_bytes: Any,
    like: Any,
    config: Any,
    about: Mapping[str, str] | None = None,
    names: _Names = _MODEL,
) -> _Work:
    texts = _checked(rules, config, about)
    original = like if isinstance(like, HubDirectory | HubFiles | SideFiles | None) else HubDirectory(local_path(like, argument="like"))  # fmt: skip
    beside = {} if original is None else original.beside(BESIDE)
    found = None
    if config is None and HUB_CONFIG in beside:
        config = found = config_of(beside[HUB_CONFIG], f"{original}: {HUB_CONFIG}")
    name = dtype if dtype is None or isinstance(dtype, str) else dtype_name(dtype)
    rounding = None if name is None else cast(name)
    done = compose() if rules is None else rules
    table = with_aliases(table_of(compose(), weights.specs), weights.ties, done)
    base = dict.fromkeys(_beside_adapter(table, names.adapter), "no part of the adapter")
    table = done.on({key: each for key, each in table.items() if key not in base} if base else table)
    tied = is_tied(config, by_default=None if config is None else tied_by_default(config.get("model_type")))
    table, left_out = by_convention(table, weights.ties, is_tied=tied)
    left_out |= base
    if config is not None:
        check_experts_apart(config, table)
    if names.adapter:
        table = _of_adapter(table, weights)
    if rounding is not None:
        cut = rounding.on(table)
        table = {key: table[key] if is_made_of(table[key], weights.buffers) else each for key, each in cut.items()}
    if config is not None:
        text = config_text(config, name, dtypes={each.dtype for each in table.values()})
        if config is not found or config_of(text, HUB_CONFIG) != found:
            beside[names.config] = text
    weight_map = original.weight_map() if shard_bytes is None and isinstance(original, HubDirectory) else None
    if weight_map is not None:
        gone = [key for key in weight_map if key not in table]
        left_out |= {key: "tied to the embeddings" for key in gone if tied and key.endswith("lm_head.weight")}
        left_out |= {key: "the scale of a tensor that is not quantised any more" for key in gone if key.removesuffix("_scale_inv") in table}  # fmt: skip
    files = plan_hub_files(
        leaf_specs(table),
        shard_bytes=shard_size(shard_bytes) if shard_bytes is not None else _SHARD_BYTES if names is _MODEL else None,
        weight_map=weight_map,
        tied=left_out,
        stem=names.stem,
        metadata=texts,
    )
    _ = [each.header for each in files]  # names and texts that files cannot have are refused now
    if len(files) > 1 or files[0].name != f"{names.stem}.safetensors":
        beside[HUB_INDEX] = hub_index_text(files)
    if taken := sorted(beside.keys() & {each.name for each in files}):
        raise InvalidArgument("like", expected="other names for files of weights", found=", ".join(taken), fix="pass shard_bytes")  # fmt: skip
    said = "\n".join(str(each) for each in (rules, rounding) if each is not None)
    return _Work(HubPlan(files, dict(sorted(beside.items())), left_out, said), table, weights)


def _beside_adapter(table: Table, adapter: str) -> list[str]:
    """What is not of an adapter, if one is written."""
    return [key for key in table if not is_of_adapter(key, adapter)] if adapter else []


def _of_adapter(table: Mapping[str, Expression], weights: OpenWeights) -> dict[str, Expression]:
    """The tensors of an adapter under the names of its files.

    Raises:
        InvalidState: if one has the name that it has in the model.
    """
    if odd := [key for key in table if key in weights.specs]:
        raise InvalidState(odd[0], expected="a matrix of low rank, or a module of modules_to_save in the configuration", found="another part of the adapter",
                           fix="pass the configuration of this adapter; or publish the merged weights")  # fmt: skip
    before = before_base_model(table)
    return {key.removeprefix(before): each for key, each in table.items()}


def _checked(rules: object, config: object, about: object) -> dict[str, str]:
    """The texts of the headers: those of ``about``, and our own; the other two are checked.

    Raises:
        InvalidArgument: for something else than a transform, and what is to be in a file; and if ``about`` contradicts what readers rely on.
    """
    if rules is not None:
        transform_given("rules", rules)
    if config is not None:
        document(
            "config", config, fix="pass what is to be in the file: HubDirectory(path).config(), or json.loads(text)"
        )
    texts = mapping_given("about", about, values=str)
    ours = {"format": "pt", **({} if rules is None else {"trainfold.rules": str(rules)})}
    for key in ours.keys() & texts.keys():
        if texts[key] != ours[key]:
            raise InvalidArgument("about", expected=f"{key} as it is written, {shown(ours[key])}", found=shown(texts[key]), fix=f"leave {key} out")  # fmt: skip
    return {"format": "pt", **texts, **ours}


def _on_rank_zero(world: Collectives, weights: Any, path: str | Path, arguments: Mapping[str, Any]) -> HubPlan:
    """Write on rank 0. Of a state, it gets from the other ranks what they have."""
    if isinstance(weights, TrainState):
        return reading_rank_zero(world, weights, lambda found: _written(found, path, arguments), doing=_DOING)

    def from_source() -> HubPlan:
        with opened_weights(weights) as found:
            return _written(found, path, arguments)

    return on_rank_zero(world, from_source, doing=_DOING)


def _written(weights: OpenWeights, path: str | Path, arguments: Mapping[str, Any]) -> HubPlan:
    with ExitStack() as held:
        work = without_collecting(_planned)(weights, **arguments)
        plan = work.plan
        held.callback(release_buffers)
        memory = ReusedMemory(work.weights)
        staged = held.enter_context(staged_directory(path, plan=_identity(work), files=plan.sizes))
        weights.expect(_reads(work))
        for file in plan.files:
            staged.write(file.name, partial(_bytes_of, file, work.table, memory), size_bytes=file.size_bytes)
        for name, data in plan.beside.items():
            staged.write(name, [data], size_bytes=len(data))
        for file in plan.files:
            _check(staged.path_of(file.name), file)
        work.weights.check()
        staged.commit()
    return plan


def _identity(work: _Work) -> str:
    """A text that is another one for other contents; where the weights have none, nothing is kept."""
    weights, plan = work.weights, work.plan
    if not weights.identity:
        return uuid.uuid4().hex
    headers = [digest_of(each.header) for each in plan.files]
    beside = {name: digest_of(data) for name, data in plan.beside.items()}
    return digest_of(json.dumps([weights.identity, plan.rules, headers, beside, list(plan.left_out)]).encode())


def _bytes_of(file: HubFile, table: Mapping[str, Expression], memory: ReusedMemory, start: int) -> Iterator[Buffer]:
    """The bytes of a file from an offset on, one tensor after the other."""

    def of_tensor(each: Expression) -> Iterator[Buffer]:
        whole = whole_box(each.shape)
        is_of_one = len(list(each.reads(whole))) == 1
        data = tensor_bytes(each.computed(whole, memory.read if is_of_one else memory.weights.read))
        for at in range(0, len(data), _PIECE_BYTES):
            yield data[at : at + _PIECE_BYTES]

    sections: list[Section] = [(len(file.header), lambda: [file.header])]
    sections += [
        (size_bytes(spec.dtype, spec.shape), partial(of_tensor, table[name])) for name, spec in file.tensors.items()
    ]
    return bytes_from(sections, start)


def _reads(work: _Work) -> Iterator[tuple[str, Box]]:
    """What `_bytes_of` reads of all files, in order."""
    for file in work.plan.files:
        for name in file.tensors:
            each = work.table[name]
            yield from ((source.name, box) for source, box in each.reads(whole_box(each.shape)))


def _check(path: str, file: HubFile) -> None:
    """Open a file as its readers do, and compare what they see in it.

    Raises:
        SaveFailed: if it is something else.
    """
    from safetensors import SafetensorError, safe_open

    found: object
    try:
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
            found = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        found = error
    if found != {name: (HUB_DTYPES[each.dtype], each.shape) for name, each in file.tensors.items()}:
        shown = found if isinstance(found, Exception) else "others"
        raise SaveFailed(path, expected="the tensors that were written", found=shown, fix="report this: the file was not committed")  # fmt: skip

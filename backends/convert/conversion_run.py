"""`plan_conversion` and `run_conversion`: between the formats, a tensor at a time. What is planned is what is carried out."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.convert.dcp_target import DcpContents, dcp_contents, write_dcp_contents
from trainfold.backends.convert.native_contents import (
    Advance,
    contents_of_checkpoint,
    contents_of_weights,
)
from trainfold.backends.convert.native_target import NativeContents, check_native_target, native_room, write_native
from trainfold.backends.convert.opened_source import STEP_TEXT, OpenedSource, with_adapter
from trainfold.backends.formats.present_directory import is_present
from trainfold.backends.formats.staging_place import check_room, check_vacant, staging_of
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.stores.local import LocalStore, open_store
from trainfold.backends.stores.place import bytes_on_disk, free_path, is_object_url, local_path
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.hub_files import HubFiles, hub_files_in
from trainfold.backends.weights.hub_writer import plan_hub_directory, write_hub_directory
from trainfold.backends.weights.opened import opened_weights
from trainfold.core.component_names import in_order
from trainfold.core.errors import CheckpointMissing, InvalidArgument
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, step_of
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import Box
from trainfold.core.transform.conversion import (
    Conversion,
    check_without_adapters,
    checked_target,
    dtype_of,
    rules_for,
    with_converters,
)
from trainfold.core.transform.transform import Transform
from trainfold.core.transform.values import cast
from trainfold.core.weights.hub.hub_config import HUB_CONFIG, config_of
from trainfold.core.weights.open_weights import OpenWeights

_SHARD_BYTES: Final = "5GB"
_FIRST_OF_RUN: Final = 4  # part of a URL below which a run can be: before it are scheme, bucket and a prefix


@final
@attrs.frozen
class PlannedConversion:
    """A conversion that can be carried out.

    Attributes:
        plan: what it reads and writes, which prints.
        opened: the source.
        rules: what is done to names; None for nothing.
        dtype: torch's name of that to which floating parameters are cast; None for none.
        like: the directory of the original model, if the target is one of a hub.
        config: the configuration of the model, if it is known.
        shard_bytes: how large the files of a hub are, if they cannot be those of ``like``.
    """

    plan: Conversion
    opened: OpenedSource
    rules: Transform | None
    dtype: str | None
    like: HubDirectory | HubFiles | None
    config: Mapping[str, Any] | None = attrs.field(repr=False)
    shard_bytes: str | None = None


@without_collecting
def plan_conversion(  # noqa: PLR0913 - keywords
    opened: OpenedSource,
    target: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    rules: str | Transform | None = None,
    like: str | Path | None = None,
    lora: str | Path | None = None,
    dequantise: bool = False,
) -> PlannedConversion:
    """Plan a conversion on names, dtypes and shapes; no tensor is read, and the target and the room on its disk are looked at.

    Args:
        opened: what is read.
        target: the path that is written, which `run_conversion` says more of.
        to: ``native``, ``hf`` or ``dcp``.
        dtype: to which floating parameters are cast, such as ``bf16``. The optimizer is left out then: its state is never cast.
        rules: a family of `hub_rules`, if names are translated, or a transform that is applied as it is. The optimizer is left out then.
        like: the directory of the original model, or its ``config.json``: it has the numbers that rules need, and for a target of a hub what is beside the weights.
            By default the source, if it is one of a hub, or the files that a checkpoint holds of it.
        lora: the configuration of an adapter of peft, or its directory: the adapter is merged. The optimizer is left out then.
        dequantise: whether quantised weights become what the configuration says. The optimizer is left out then.

    Raises:
        InvalidArgument: for what cannot be done.
        InvalidState: if the tensors have not the form that the rules need.
        CheckpointError: the matching subclass, if something cannot be read.
        NoSpace: if the disk of the target has no room for it.
    """
    checked_target(to)
    where = _free_place(str(target), to)
    name = dtype_of(dtype)
    original, config = like_of(opened, like)
    opened, adapter = (opened, None) if lora is None else with_adapter(opened, lora)
    named = rules if isinstance(rules, Transform) else rules_for(opened.format, to, rules, config)
    found = with_converters(named, adapter=adapter, quantised=(config or {}) if dequantise else None)
    said = "\n".join(str(each) for each in (found, None if name is None else cast(name)) if each is not None)
    first = Conversion(opened.where, opened.format, where, to, opened.step, said, {}, {}, ("model",), (), {})
    planned = PlannedConversion(first, opened, found, name, original if to == "hf" else None, config,
                                shard_bytes=_SHARD_BYTES if isinstance(rules, Transform) else None)  # fmt: skip
    done = attrs.evolve(planned, plan=_PLANS[to](planned))
    if to == "hf":
        check_without_adapters(done.plan.after, to)
    if not done.plan.after and (opened.checkpoint is None or to != "native"):
        raise InvalidArgument(opened.where, expected="tensors of a model", found="no tensor", fix="see `trainfold inspect`")  # fmt: skip
    return done


def _free_place(target: str, to: str) -> str:
    """The target as it is shown: a path as it was given, and the URL of a bucket as its store has it.

    Raises:
        InvalidArgument: if it is in a checkpoint; for the URL of a bucket, if the format needs a directory.
    """
    if not is_object_url(target):
        free_path(target, argument="target")
        return target
    url = open_store(target).url
    if to != "native":
        raise InvalidArgument("target", expected=f"a local directory for {to}: in a bucket only runs are written (--to native)", found=url,
                              fix="name a local directory, and send it with the tool of the provider")  # fmt: skip
    if _is_in_checkpoint(url):
        raise InvalidArgument("target", expected="a run: a place that is not called like a checkpoint, and is not in one", found=url,
                              fix="name another one, such as one beside the run")  # fmt: skip
    return url


def _is_in_checkpoint(url: str) -> bool:
    """Whether a URL of a bucket is read as that of a checkpoint, by its last part, or lies in one: whatever lies there is deleted with it."""
    parts = url.split("/")
    if step_of(parts[-1]) is not None:
        return True
    for at in range(_FIRST_OF_RUN, len(parts)):
        if step_of(parts[at]) is not None:
            above = open_store("/".join(parts[:at]))
            if any(above.size(each) is not None for each in (RUN_FILE, f"{parts[at]}/{MANIFEST}")):
                return True
    return False


def run_conversion(planned: PlannedConversion, *, advance: Advance = lambda _: None) -> str:
    """Carry out a conversion. A killed one goes on where it stopped if it is run again; in a bucket it starts again from the beginning. Until the end, nothing at the target can be taken for whole.

    Args:
        planned: from `plan_conversion`.
        advance: called with the number of bytes of each tensor that was read.

    Returns:
        What was written: a path, or the URL of a checkpoint.

    Raises:
        CheckpointError: the matching subclass, if something cannot be read or written.
        InvalidArgument: if there is something else at the target.
    """
    if planned.plan.to == "native":
        store = open_store(planned.plan.target)
        with _contents(planned, advance) as (contents, _):
            return f"{store.url}/{write_native(contents, store)}"
    target = local_path(planned.plan.target)
    if planned.plan.to == "hf":
        write_hub_directory(_Counted(planned.opened.model, advance), target, **_hub_options(planned))
        return target
    with _dcp(planned, advance) as (directory, weights):
        write_dcp_contents(directory, weights, target)
    return target


def _native_plan(planned: PlannedConversion) -> Conversion:
    with _contents(planned, lambda _: None) as (contents, before):
        store, plan = open_store(planned.plan.target), contents.plan
        is_there = check_native_target(contents, store)
        model = contents.described.get("model")
        return attrs.evolve(
            _with_room(planned.plan, store.url, native_room(plan), store.url, is_there=is_there)
            if isinstance(store, LocalStore)
            else attrs.evolve(
                planned.plan, is_there=is_there, needed_bytes=0 if is_there else plan.size_bytes, free_bytes=None
            ),
            before=before,
            after={} if model is None else model.tensors,
            components=tuple(contents.described),
            left_out=contents.omitted,
            tensors_left_out=_reasons(planned, contents.omitted),
            files={file.name: file.size_bytes for file in plan.files},
        )


@contextmanager
def _contents(planned: PlannedConversion, advance: Advance) -> Iterator[tuple[NativeContents, Mapping[str, LeafSpec]]]:
    """What a new checkpoint will hold, and the model that is read."""
    opened = planned.opened
    if opened.checkpoint is not None and planned.rules is None and planned.dtype is None:
        contents = contents_of_checkpoint(opened, opened.checkpoint, advance)
        model = contents.described.get("model")
        yield contents, {} if model is None else model.tensors
        return
    with opened_weights(opened.model) as weights:
        yield contents_of_weights(opened, weights, planned.rules, planned.dtype, advance), weights.specs


def _hub_options(planned: PlannedConversion) -> dict[str, Any]:
    config = None if planned.like is not None else planned.config
    about = {} if planned.plan.step is None else {STEP_TEXT: str(planned.plan.step)}
    return {
        "rules": planned.rules,
        "dtype": planned.dtype,
        "shard_bytes": planned.shard_bytes,
        "like": planned.like,
        "config": config,
        "about": about,
    }


def _hub_plan(planned: PlannedConversion) -> Conversion:
    plan = plan_hub_directory(planned.opened.model, **_hub_options(planned))
    tensors = dict(chain.from_iterable(file.tensors.items() for file in plan.files))
    return attrs.evolve(
        _in_a_directory(planned.plan, plan.sizes),
        before=planned.opened.model.specs(),
        after=tensors,
        left_out=tuple(in_order(planned.opened.others)),
        files=plan.sizes,
        tensors_left_out={**_reasons(planned, planned.opened.others), **plan.left_out},
    )


def _reasons(planned: PlannedConversion, left_out: Iterable[str]) -> dict[str, str]:
    """Why the optimizer is left out, and what takes it."""
    opened, name = planned.opened, "optimizer"
    if name not in left_out or name not in opened.others:
        return {}
    if planned.plan.to == "hf":
        return {name: "a directory of a hub has none"}
    if opened.checkpoint is None:
        return {
            name: f"{opened.format} does not say its class; trainfold.weights.take_training takes it where a program has it"
        }
    return {name: "its state is never cast, and has the names of its parameters"}


@contextmanager
def _dcp(planned: PlannedConversion, advance: Advance) -> Iterator[tuple[DcpContents, OpenWeights]]:
    with opened_weights(planned.opened.model) as weights:
        yield dcp_contents(planned.opened, weights, planned.rules, planned.dtype, advance), weights


def _dcp_plan(planned: PlannedConversion) -> Conversion:
    with _dcp(planned, lambda _: None) as (contents, weights):
        files = contents.plan.sizes
        return attrs.evolve(
            _in_a_directory(planned.plan, files),
            before=weights.specs,
            after={name: each for name, each in contents.specs.items() if name.startswith("model.")},
            components=contents.components,
            left_out=contents.left_out,
            files=files,
            tensors_left_out={**_reasons(planned, contents.left_out), **contents.reasons},
        )


def _in_a_directory(plan: Conversion, files: Mapping[str, int]) -> Conversion:
    target = check_vacant(plan.target, files)
    return _with_room(plan, target, sum(files.values()), staging_of(target), is_there=is_present(target, files))


def _with_room(plan: Conversion, target: str, size_bytes: int, begun: str, *, is_there: bool) -> Conversion:
    """A plan with what it needs of its disk, beside what a killed process has begun; that is gone on with, or removed first."""
    needed_bytes = 0 if is_there else max(0, size_bytes - bytes_on_disk(begun))
    return attrs.evolve(plan, is_there=is_there, needed_bytes=needed_bytes, free_bytes=check_room(target, needed_bytes))


def like_of(
    opened: OpenedSource, like: str | Path | None
) -> tuple[HubDirectory | HubFiles | None, Mapping[str, Any] | None]:
    """The directory of the original model, or the files of it that a checkpoint holds, and its configuration; None for what is not there.

    Args:
        opened: the source, which is the original, or has its files, if no other is given.
        like: a directory, or a ``config.json``.

    Raises:
        CheckpointMissing: if there is no such path.
        CheckpointDamaged: if the configuration is not JSON.
    """
    if like is None and opened.checkpoint is not None:
        return _with_config(hub_files_in(opened.checkpoint.store, opened.checkpoint.manifest))
    place = Path(local_path(opened.where if like is None else like, argument="like"))
    if like is not None and place.is_file():
        return None, config_of(place.read_bytes(), str(place))
    if like is not None and not place.is_dir():
        raise CheckpointMissing(
            str(place), expected="the directory of a model, or its config.json", found="nothing", fix="correct the path"
        )
    if like is None and opened.format != "hf":
        return None, None
    return _with_config(
        opened.model if like is None and isinstance(opened.model, HubDirectory) else HubDirectory(place)
    )


def _with_config(
    found: HubDirectory | HubFiles | None,
) -> tuple[HubDirectory | HubFiles | None, Mapping[str, Any] | None]:
    if found is None:
        return None, None
    return found, found.config() if found.beside([HUB_CONFIG]) else None


@final
@attrs.frozen
class _Counted:
    """A source that says how much of it was read."""

    source: Any
    advance: Advance

    def specs(self) -> Mapping[str, LeafSpec]:
        found: Mapping[str, LeafSpec] = self.source.specs()
        return found

    def supply(self, wanted: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.source.supply(wanted):
            self.advance(tensor.nbytes)
            yield name, tensor

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        with opened_weights(self.source) as weights:

            def read(name: str, box: Box) -> torch.Tensor:
                found = weights.read(name, box)
                self.advance(found.nbytes)
                return found

            def read_into(name: str, box: Box, memory: torch.Tensor) -> None:
                assert weights.read_into is not None
                weights.read_into(name, box, memory)
                self.advance(memory.nbytes)

            yield attrs.evolve(weights, read=read, read_into=None if weights.read_into is None else read_into)


_PLANS: Final = {"hf": _hub_plan, "native": _native_plan, "dcp": _dcp_plan}

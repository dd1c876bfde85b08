"""`open_source`: what a path can supply for a conversion: its model, whatever the format, and what else there is."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.backends.formats.detect import detect_format
from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.runs.scan import examine, listed_run
from trainfold.backends.stores.local import LocalStore, open_store
from trainfold.backends.stores.place import is_object_url, local_path, split_checkpoint
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.backends.weights.checkpoint import CheckpointWeights
from trainfold.backends.weights.foreign.dcp_directory import DcpDirectory
from trainfold.backends.weights.foreign.found_model import model_in_dcp, model_in_torch
from trainfold.backends.weights.foreign.torch_file import TorchFile
from trainfold.backends.weights.foreign.training import accelerate_training
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.transformed import Transformed
from trainfold.core.errors import CheckpointForeign, CheckpointMissing, InvalidArgument, TrainfoldError
from trainfold.core.format.file_names import step_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import current_head
from trainfold.core.history.recognise import unread_newest
from trainfold.core.transform.families.adapter_rules import adapter_rules, is_of_adapter
from trainfold.core.weights.detected import FORMATS, NATIVE, Detected
from trainfold.core.weights.hub.hub_config import config_of
from trainfold.core.weights.several.several_sources import SeveralSources
from trainfold.core.weights.source import ListedSource

_TRAINER_STATE: Final = "trainer_state.json"
_TRAINER_STATE_BYTES: Final = 256 << 20
STEP_TEXT: Final = "trainfold.step"
"""What the step of a checkpoint is called in the headers of files that are made of it."""

_ADAPTER: Final = "adapter_model.safetensors"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_STEP_DIGITS: Final = 17  # of the largest step of a checkpoint


@final
@attrs.frozen
class NativeCheckpoint:
    """A checkpoint of a run.

    Attributes:
        store: the run.
        name: its directory.
        manifest: its manifest.
    """

    store: Store
    name: str
    manifest: Manifest = attrs.field(repr=False)


@final
@attrs.frozen
class OpenedSource:
    """What a path can supply.

    Attributes:
        detected: its format, with what shows it.
        format: the format that it is read as.
        model: its model.
        step: its step, if it says one.
        others: what it has beside the model, such as ``optimizer``.
        checkpoint: the checkpoint, if it is one of a run.
    """

    detected: Detected
    format: str
    model: ListedSource
    step: int | None
    others: tuple[str, ...]
    checkpoint: NativeCheckpoint | None = None

    @property
    def where(self) -> str:
        """The path."""
        return self.detected.path


@without_collecting
def open_source(
    path: str | Path, *, asked: str | None = None, key: str | None = None, whole: bool = False
) -> OpenedSource:
    """Open what is at a path, and read no tensor.

    Args:
        path: a file or directory of one of the formats; or the URL of a run in a bucket, or of a checkpoint of it.
        asked: the format that it must have, if two are there; see `Detected.agreed`.
        key: in what torch has written, the keys under which the model is, with dots between them; empty for the tensors at the top, or for all if there are none. None for the usual ones; see `model_place`.
        whole: whether all tensors that torch has written are taken for the model, under the names that they have in the whole.

    Raises:
        InvalidArgument: for keys in a format that has none, or if it cannot be known which tensors are the model's.
        CheckpointForeign: if the format is not known, not the one asked for, or not one that is read.
        CheckpointMissing: if there is nothing.
        CheckpointError: the matching subclass, if a run has no checkpoint that can be used.
    """
    detected = detect_format(path)
    found, is_far = detected.agreed(asked), is_object_url(str(path))
    if key is not None and found not in _WHOLE:
        raise InvalidArgument("key", expected=f"a source with keys: {' or '.join(_WHOLE)}", found=f"{found} at {path}", fix="leave out --key")  # fmt: skip
    if is_far and found not in NATIVE:
        raise CheckpointForeign(detected.path, expected="in a bucket, a run of trainfold or a checkpoint of one", found=FORMATS[found],
                                fix="copy it to a disk with the tool of the provider, and name that")  # fmt: skip
    if found in NATIVE:
        return _native(detected, found, *(_in_bucket(str(path)) if is_far else _on_disk(Path(local_path(path)), found)))
    place = Path(local_path(path))
    if whole and found in _WHOLE:
        return OpenedSource(detected, found, _WHOLE[found](place), None, ())
    if found in ("safetensors", "hf"):
        hub = HubDirectory(place)
        step, others = (_step_in(hub), ()) if found == "safetensors" else (_step_beside(place, hub), _beside(place))
        return OpenedSource(detected, found, hub, step, others)
    return attrs.evolve(_FOREIGN[found](place, key), detected=detected)


def has_keys(path: str | Path) -> bool:
    """Whether what is at a path may have a model under a key."""
    return detect_format(path).format in _WHOLE


def with_adapter(opened: OpenedSource, path: str | Path) -> tuple[OpenedSource, Mapping[str, Any]]:
    """A source with the adapter of peft that is at a path, and the configuration of the adapter.

    Args:
        opened: a source that has the tensors of the adapter; or one without, which gets them from the path.
        path: an ``adapter_config.json``, or the directory with it.

    Raises:
        CheckpointMissing: if there is no configuration, or no adapter.
        InvalidArgument: if both have an adapter.
    """
    place = Path(local_path(path))
    file = place / _ADAPTER_CONFIG if place.is_dir() else place
    if not file.is_file():
        raise CheckpointMissing(str(file), expected="the configuration of an adapter of peft", found="nothing", fix="correct the path")  # fmt: skip
    config = config_of(file.read_bytes(), str(file))
    has_own = any(is_of_adapter(name) for name in opened.model.specs())
    has_tensors = place.is_dir() and (place / _ADAPTER).is_file()
    if has_own and has_tensors:
        raise InvalidArgument("convert.lora", expected="one adapter", found=f"one in {opened.where}, and one in {place}",
                              fix=f"pass {file} for the first, or a source without adapters")  # fmt: skip
    if has_own:
        return opened, config
    if not has_tensors:
        raise CheckpointMissing(
            str(place), expected=f"the tensors of an adapter, in {opened.where} or beside the configuration", found="none",
            fix=f"pass the directory with {_ADAPTER}, or a source with adapters under the names of peft")  # fmt: skip
    rules = adapter_rules(modules_to_save=config.get("modules_to_save")).inverse
    adapter = Transformed(HubDirectory(place), rules)
    return attrs.evolve(opened, model=SeveralSources([opened.model, adapter])), config


def _on_disk(place: Path, found: str) -> tuple[Store, str]:
    """A run, and the name in it of the directory of a checkpoint."""
    real = place.resolve() if place.is_symlink() else place  # `latest` is a link to a checkpoint
    return (LocalStore(real.parent), real.name) if found == "checkpoint" else (LocalStore(real), "")


def _in_bucket(url: str) -> tuple[Store, str]:
    """The same of a URL."""
    run, name = split_checkpoint(url)
    return open_store(run), name


def _native(detected: Detected, found: str, store: Store, directory: str) -> OpenedSource:
    seen = glimpse(store)
    inventory = listed_run(seen)
    if found == "checkpoint":
        step = step_of(directory)
        if step is None:
            raise CheckpointForeign(
                detected.path,
                expected="a directory step-... of a run",
                found="another name",
                fix="copy it into its run, under the name that it had",
            )
    else:
        head = current_head(inventory)
        if (error := unread_newest(inventory, head)) is not None:
            raise error
        if head is None:
            raise CheckpointMissing(
                detected.path, expected="a complete checkpoint", found="none", fix=f"see `trainfold ls {store.url}`"
            )
        step = head.step
    name = next((each.name for each in inventory.entries if each.head is not None and each.head.step == step), "")
    entry = examine(seen, inventory, name).entry(name) if name else None
    if entry is None or entry.manifest is None:
        raise CheckpointMissing(
            detected.path,
            expected="a checkpoint that can be used",
            found="none" if entry is None else entry.problem,
            fix="see `trainfold verify`",
        )
    manifest, model = entry.manifest, CheckpointWeights(store, step=step)
    others = tuple(each.name for each in manifest.components if each.name != "model")
    return OpenedSource(
        detected,
        found,
        model if manifest.component("model") is None else model.known_as(manifest),
        step,
        others,
        NativeCheckpoint(store, name, manifest),
    )


def _beside(place: Path) -> tuple[str, ...]:
    """What a directory of a model hub has beside the model, as a trainer leaves it: files of pickles, which are not read."""
    names = {
        "optimizer": "optimizer.pt",
        "scheduler": "scheduler.pt",
        "rng": "rng_state.pth",
        "trainer": _TRAINER_STATE,
    }
    return tuple(component for component, name in names.items() if (place / name).is_file())


def _step_beside(place: Path, hub: HubDirectory) -> int | None:
    """The step that a trainer has noted beside its weights."""
    file = place / _TRAINER_STATE
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        if file.stat().st_size <= _TRAINER_STATE_BYTES:
            found = json.loads(file.read_bytes()).get("global_step")
            return found if type(found) is int and found >= 0 else None
    return _step_in(hub)


def _step_in(source: HubDirectory) -> int | None:
    """The step of the checkpoint of which files were made, in their headers."""
    found = ""
    with suppress(TrainfoldError):  # what is wrong with it is said when it is read
        found = source.about().get(STEP_TEXT, "")
    return int(found) if found.isdecimal() and len(found) <= _STEP_DIGITS else None


def _dcp(place: Path, key: str | None) -> OpenedSource:
    found = model_in_dcp(place, key)
    return OpenedSource(_NOTHING, "dcp", found.model, found.step, found.others)


def _torch(place: Path, key: str | None) -> OpenedSource:
    found = model_in_torch(place, key)
    return OpenedSource(_NOTHING, "torch", found.model, found.step, found.others)


def _accelerate(place: Path, key: str | None) -> OpenedSource:  # noqa: ARG001 - of all
    found = accelerate_training(place)
    names = [name for name, _ in found.left_out]
    others = ("optimizer", *(("scheduler",) if found.scheduler is not None else ()), *names)
    return OpenedSource(_NOTHING, "accelerate", found.model, found.step, others)


_NOTHING: Final = Detected("", (), ())
_WHOLE: Final[Mapping[str, Callable[[Path], ListedSource]]] = {"dcp": DcpDirectory, "torch": TorchFile}
_FOREIGN: Final = {"dcp": _dcp, "torch": _torch, "accelerate": _accelerate}

"""`Training`: model, optimizer and step of another program's checkpoint. `dcp_training`, `torch_training`, `lightning_training` and `accelerate_training` open one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs

from trainfold.backends.formats.detect import check_format
from trainfold.backends.stores.place import local_path
from trainfold.backends.weights.foreign.dcp_directory import DcpDirectory
from trainfold.backends.weights.foreign.torch_file import TorchFile
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.core.errors import CheckpointForeign, CheckpointHostile, CheckpointMissing, InvalidArgument
from trainfold.core.layout.slices import whole_box
from trainfold.core.printable import printable
from trainfold.core.state.names.wrapper_names import canonical_name
from trainfold.core.weights.source import ListedSource, Wanted

_SHOWN: Final = 8  # names in a message
_SECOND: Final = "it is of a second one; the first one is taken"
NO_SCHEDULER: Final = "it is not the state_dict() of one scheduler"
"""Why what is under the name of a scheduler is not taken."""
_ANOTHER: Final = "it is of the other program; what it says cannot be checked here"


@final
@attrs.frozen
class SavedGroup:
    """A param group of the saved optimizer.

    Attributes:
        params: names, or the numbers of parameters in the order in which the optimizer has them.
        hyper: hyperparameter -> value.
    """

    params: tuple[str | int, ...]
    hyper: Mapping[str, Any]


@final
@attrs.frozen
class Training:
    """What another program's checkpoint has of a training. It prints what is taken of it, and what is not. Pass it to `take_training`.

    Attributes:
        where: the path.
        model: its weights, by the names of the model.
        slots: the optimizer's tensors, as ``NAME.SLOT``, or ``NUMBER.SLOT`` where the groups have numbers. None without an optimizer.
        values: those of its slots that are not tensors.
        groups: its param groups.
        step: optimizer steps done; None if the checkpoint does not say it.
        scheduler: the ``state_dict()`` of its scheduler, if there is one.
        left_out: what else is there, with the reason why it is not taken.
        beside: where the model's names are at the top, the first parts of the names that are not the model's.
    """

    where: str
    model: ListedSource
    slots: ListedSource | None
    values: Mapping[str, Any]
    groups: tuple[SavedGroup, ...]
    step: int | None
    scheduler: Mapping[str, Any] | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    beside: frozenset[str] = frozenset()

    def __str__(self) -> str:
        count = sum(name.partition(".")[0] not in self.beside for name in self.model.specs())
        lines = [f"{self.where}:", f"  model      {count} tensors"]
        if self.slots is not None:
            held = len(self.slots.specs()) + sum(not is_absent(each) for each in self.values.values())
            how = "by order" if self.is_numbered else "by name"
            lines.append(
                f"  optimizer  {held} values of {sum(len(each.params) for each in self.groups)} parameters, {how}"
            )
        lines.append(f"  step       {'not said' if self.step is None else self.step}")
        if self.scheduler is not None:
            lines.append("  scheduler  its state_dict")
        lines += [f"  not taken  {printable(name)}: {reason}" for name, reason in self.left_out]
        return "\n".join(lines)

    @property
    def is_numbered(self) -> bool:
        """Whether the optimizer knows its parameters by their order alone."""
        return any(isinstance(each, int) for group in self.groups for each in group.params)


def is_absent(value: Any) -> bool:
    """Whether a value of a saved optimizer says that there is no slot: None, as in SGD without momentum, or the empty dict of a parameter without slots.

    Examples:
        >>> is_absent(None), is_absent({}), is_absent(0)
        (True, True, False)
    """
    return value is None or (isinstance(value, Mapping) and not value)


def dcp_training(
    path: str | Path,
    *,
    model: str = "model",
    optimizer: str = "optim",
    step: str = "step",
    scheduler: str = "lr_scheduler",
) -> Training:
    """Open a directory of `torch.distributed.checkpoint` that has a model and an optimizer by name.

    Both forms of an optimizer are read: that of `get_state_dict`, and the flat one of torchtitan, for which the arguments are
    ``model="", optimizer="optimizer", step="train_state.step"``.

    Args:
        path: the directory.
        model: the keys of the model, with dots between them; empty if its names are at the top.
        optimizer: the keys of the optimizer.
        step: the name of the step.
        scheduler: the keys of the scheduler's state dict. It is taken if it is there, and has numbers, texts, lists, tuples and dicts of them.

    Raises:
        CheckpointError: the matching subclass; see `DcpDirectory`.
        InvalidArgument: if there is nothing under the keys of the model or the optimizer.
    """
    whole = DcpDirectory(path)
    source = whole.under(model)
    listed, named = whole.specs(), set(whole.metadata.objects)
    for argument, key in (("model", model), ("optimizer", optimizer)):
        _check_there(str(path), argument, key, [*named, *listed])
    slots = f"{optimizer}.state."
    objects = {f"{optimizer}.{name}": each for name, each in whole.under(optimizer).objects().items()}
    objects |= {step: whole.object_of(step)} if step in named else {}  # the others may be of any class
    single = {
        name: spec
        for name, spec in listed.items()
        if (name == step and spec.shape in ((), (1,))) or name.startswith(f"{optimizer}.param_groups.")
    }
    wanted = {name: Wanted(spec.dtype, spec.shape, whole_box(spec.shape)) for name, spec in single.items()}
    objects |= {name: tensor.item() if name == step else tensor.clone() for name, tensor in whole.supply(wanted)}
    tops = {
        name.partition(".")[0] for name in (*named, *(listed if model else ()))
    }  # without a key, a tensor at the top may be a weight
    schedule, refused = _scheduler(whole, scheduler)
    known = {each.partition(".")[0] for each in (model, optimizer, step, *((scheduler,) if schedule else ()))}
    return Training(
        str(path),
        source,
        whole.under(f"{optimizer}.state"),
        {name.removeprefix(slots): each for name, each in objects.items() if name.startswith(slots)},
        _groups_by_name(objects, f"{optimizer}.param_groups."),
        _step(objects.get(step)),
        schedule or None,
        tuple(
            (name, refused if refused and name == scheduler.partition(".")[0] else _ANOTHER)
            for name in sorted(tops - known)
        ),
        frozenset() if model else _tops(optimizer, step, scheduler),
    )


def _scheduler(whole: DcpDirectory, keys: str) -> tuple[dict[Any, Any], str]:
    """The state dict under keys, as it was nested; empty if there is none, or, with the reason, if it has what is not read as a plain value."""
    found: dict[Any, Any] = {}
    prefix = f"{keys}."
    if any(name.startswith(prefix) for name in whole.specs()):
        return {}, "it has tensors"
    for name in whole.metadata.objects if keys else ():
        if not name.startswith(prefix):
            continue
        path = whole.metadata.paths.get(name, tuple(name.split(".")))
        inner = next((path[at:] for at in range(1, len(path)) if ".".join(map(str, path[:at])) == keys), (name,))
        place = found
        for key in inner[:-1]:
            place = place.setdefault(key, {})
            if type(place) is not dict:
                return {}, f"{printable(name)} is inside of another value"
        try:
            place[inner[-1]] = whole.object_of(name)
        except CheckpointHostile as error:
            return {}, f"{printable(name)} has {error.found}"
    return found, ""


def torch_training(
    path: str | Path,
    *,
    model: str = "model",
    optimizer: str = "optimizer",
    step: str = "step",
    scheduler: str = "scheduler",
) -> Training:
    """Open a file of `torch.save` that has ``model.state_dict()`` and ``optimizer.state_dict()`` in a dict.

    Such an optimizer knows its parameters by their order. It is taken only into an optimizer that was made of the same parameters in the same groups and order.

    Args:
        path: the file.
        model: the keys of the model's state dict, with dots between them.
        optimizer: the keys of the optimizer's state dict.
        step: the key of the step.
        scheduler: the keys of the scheduler's state dict.

    Raises:
        CheckpointError: the matching subclass; see `TorchFile`.
        InvalidArgument: if there is nothing under the keys of the model or the optimizer.
    """
    file = TorchFile(path)
    top = file.at("")
    source = TorchFile(path, prefix=model)
    source.specs()
    found, schedule = file.at(optimizer), file.read_at(scheduler)
    if found is None and optimizer.partition(".")[0] not in top:
        _check_there(str(path), "optimizer", optimizer, list(map(str, top)))
    groups = _groups(str(path), optimizer, found, file)
    known = {
        each.partition(".")[0]
        for each in (model, optimizer, step, *((scheduler,) if isinstance(schedule, Mapping) else ()))
    }
    slots = TorchFile(path, prefix=f"{optimizer}.state")
    return Training(
        str(path), source, slots, slots.objects() if found.get("state") else {}, groups, _step(file.at(step)),
        schedule if isinstance(schedule, Mapping) else None,
        tuple((str(name), NO_SCHEDULER if str(name) == scheduler else _ANOTHER) for name in top if str(name) not in known),
        frozenset() if model else _tops(optimizer, step, scheduler),
    )  # fmt: skip


def _tops(*keys: str) -> frozenset[str]:
    return frozenset(each.partition(".")[0] for each in keys if each)


def lightning_training(path: str | Path, *, module: str = "") -> Training:
    """Open a ``.ckpt`` of Lightning with one optimizer.

    Args:
        path: the file.
        module: the attribute of the LightningModule that holds the model, such as ``"model"``, if the model alone is trained here.

    Raises:
        CheckpointError: the matching subclass; see `TorchFile`.
        CheckpointForeign: if it has no optimizer, or several.
    """
    optimizers = TorchFile(path).at("optimizer_states")
    if not isinstance(optimizers, list) or len(optimizers) != 1:
        raise CheckpointForeign(str(path), expected="optimizer_states of one optimizer", found=len(optimizers) if isinstance(optimizers, list) else "none",
                                fix="take the model alone: TorchFile(path, prefix='state_dict')")  # fmt: skip
    found = torch_training(
        path, model="state_dict", optimizer="optimizer_states.0", step="global_step", scheduler="lr_schedulers.0"
    )
    schedulers = TorchFile(path).at("lr_schedulers")
    more = range(1, len(schedulers) if isinstance(schedulers, list) else 0)
    found = attrs.evolve(found, left_out=(*((f"lr_schedulers.{number}", _SECOND) for number in more), *found.left_out))
    return found if not module else attrs.evolve(found, model=TorchFile(path, prefix="state_dict", below=module))


def accelerate_training(path: str | Path) -> Training:
    """Open a directory that ``Accelerator.save_state`` has written for a plain model and one optimizer.

    The step is that of the optimizer's own counters, if it has them. Random states, samplers and custom objects are not taken: each is a pickle of its own process.

    Args:
        path: the directory.

    Raises:
        CheckpointError: the matching subclass; see `TorchFile` and `HubDirectory`.
    """
    top = Path(local_path(path, argument="accelerate_training.path"))
    names = sorted(each.name for each in top.iterdir()) if top.is_dir() else []
    if "optimizer.bin" not in names:
        check_format(top, "accelerate")
        raise CheckpointMissing(str(path), expected="a directory with optimizer.bin, as Accelerator.save_state writes it",
                                found=", ".join(map(printable, names[:_SHOWN])) or "nothing", fix="name the directory checkpoint_N")  # fmt: skip
    one = next((name for name in ("pytorch_model.bin", "model.safetensors") if name in names), None)
    weights: ListedSource = (
        TorchFile(top / one) if one == "pytorch_model.bin" else HubDirectory(top if one is None else top / one)
    )
    file = TorchFile(top / "optimizer.bin")
    groups = _groups(str(top / "optimizer.bin"), "", file.at(""), file)
    slots = TorchFile(top / "optimizer.bin", prefix="state")
    counters = [name for name in slots.specs() if name.endswith(".step")]
    wanted = {
        name: Wanted(spec.dtype, spec.shape, whole_box(spec.shape))
        for name, spec in slots.specs().items()
        if name in counters
    }
    steps = {tensor.item() for _, tensor in slots.supply(wanted)}
    schedule = TorchFile(top / "scheduler.bin").read_at("") if "scheduler.bin" in names else None
    taken = {"optimizer.bin", "pytorch_model.bin", *(["scheduler.bin"] if isinstance(schedule, Mapping) else [])}
    left = [
        (name, NO_SCHEDULER if name == "scheduler.bin" else _ANOTHER)
        for name in names
        if name not in taken and not name.startswith("model")
    ]
    left = [(name, _SECOND) for name in names if one is not None and name.startswith("model") and name != one] + left
    return Training(str(path), weights, slots, slots.objects(), groups, _step(steps.pop() if len(steps) == 1 else None),
                    schedule if isinstance(schedule, Mapping) else None, tuple(left))  # fmt: skip


def _groups_by_name(objects: Mapping[str, Any], prefix: str) -> tuple[SavedGroup, ...]:
    """The groups of ``param_groups.NUMBER.KEY``, or of ``param_groups.NAME.KEY`` for each parameter."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in objects.items():
        if name.startswith(prefix):
            group, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(group, {})[key] = value
    return tuple(
        SavedGroup(
            tuple(map(_named, hyper["params"]))
            if isinstance(hyper.get("params"), list | tuple)
            else (canonical_name(group),),
            {key: each for key, each in hyper.items() if key not in ("params", "param_names")},
        )
        for group, hyper in found.items()
    )


def _named(name: Any) -> str | int:
    return canonical_name(name) if isinstance(name, str) else name


def _step(found: Any) -> int | None:
    """A step, from an int or a counter that is a whole number."""
    if type(found) is float and found.is_integer():
        found = int(found)
    return found if type(found) is int and found >= 0 else None


def _groups(where: str, key: str, found: object, file: TorchFile) -> tuple[SavedGroup, ...]:
    """The groups of an optimizer's state dict, which is under the key in the file.

    Raises:
        CheckpointForeign: if it is not one.
    """
    groups: Any = found.get("param_groups", ()) if isinstance(found, Mapping) else None
    is_list = isinstance(groups, list | tuple)
    if not is_list or not all(
        isinstance(each, Mapping) and isinstance(each.get("params", ()), list | tuple) for each in groups
    ):
        is_dict = isinstance(found, Mapping)
        kind = "a dict whose param_groups are of another form" if is_dict else type(found).__qualname__
        several = isinstance(found, list | tuple) and found
        raise CheckpointForeign(
            f"{where}: {key}" if key else where, expected="the state_dict() of one optimizer", found=kind,
            fix=f"name one of them, such as optimizer={key + '.0'!r}" if several else "take the model alone, with take_weights and TorchFile(path, prefix=...)")  # fmt: skip
    return tuple(
        SavedGroup(
            tuple(group.get("params", ())),
            {key: each for key, each in group.items() if key not in ("params", "param_names")},
        )
        for group in (file.read_at(f"{key}.param_groups" if key else "param_groups") or ())
    )


def _check_there(where: str, argument: str, key: str, names: Iterable[str]) -> None:
    every = list(names)
    if key and not any(name == key or name.startswith(f"{key}.") for name in every):
        tops = sorted({printable(name.partition(".")[0]) for name in every})
        raise InvalidArgument(argument, expected=f"keys of {where}", found=f"{key!r}; at the top there are {', '.join(tops[:_SHOWN])}",
                              fix="name the keys under which it was saved")  # fmt: skip

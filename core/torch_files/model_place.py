"""`model_place`: which tensors of what a program has saved are those of its model, from the keys that lead to them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import printable
from trainfold.core.torch_files.dcp_metadata import PathInState

STEPS: Final = ("step", "train_state.step", "global_step")
"""The usual names of a step."""

MODEL_KEYS: Final = ("model", "state_dict", "model_state_dict", "module")
"""The usual keys of a model."""

BESIDE_MODEL: Final = {
    "optim": "optimizer", "optimizer": "optimizer", "optimizers": "optimizer", "optimizer_states": "optimizer", "optimizer_state_dict": "optimizer",
    "lr_scheduler": "scheduler", "lr_schedulers": "scheduler", "scheduler": "scheduler", "scheduler_state_dict": "scheduler",
    "dataloader": "dataset", "train_state": "trainer",
    "rng": "rng", "rng_state": "rng", "cuda_rng_state": "rng",
}  # fmt: skip
"""The usual key of what is beside a model -> the component that it is."""

_SHOWN: Final = 8


@final
@attrs.frozen
class ModelPlace:
    """Where the model is.

    Attributes:
        key: the keys that lead to it, with dots between them; empty if its names are at the top.
        names: its tensors, by the names that they have in the whole.
    """

    key: str
    names: frozenset[str] = attrs.field(repr=False)


def model_place(tensors: Iterable[str], paths: Mapping[str, PathInState], *, key: str | None, where: str) -> ModelPlace:
    """Find the tensors of the model. Nothing is guessed: where the keys leave it open, they are shown.

    It is under the one usual key at the top (`MODEL_KEYS`). Without such a key it is the tensors at the top itself, if all others are under the usual key of
    something else (`BESIDE_MODEL`).

    Args:
        tensors: the names of all tensors: their keys, with dots between them.
        paths: name -> its keys one by one, as far as they are known. A key may have dots in it.
        key: the keys of the model, if they are given; empty for the tensors at the top, or for all if there are none.
        where: the path, for messages.

    Raises:
        InvalidArgument: if it cannot be known, or there is no tensor under the keys.

    Examples:
        >>> paths = {"model.w": ("model", "w"), "optim.state.w.exp_avg": ("optim", "state", "w", "exp_avg")}
        >>> model_place(paths, paths, key=None, where="x.pt").key
        'model'
        >>> paths = {"net.w": ("net", "w"), "ema.w": ("ema", "w")}
        >>> model_place(paths, paths, key=None, where="x.pt")
        Traceback (most recent call last):
        trainfold.core.errors.InvalidArgument: x.pt: expected one key of the model, found tensors under net, ema; name it: --key net; or --key '' if the names of the model are at the top
    """
    listed = list(tensors)
    if key is None:
        key = _usual_key(listed, paths, where)
    if key:
        chosen = [name for name in listed if name.startswith(f"{key}.")]
    else:
        loose = [name for name in listed if _is_loose(name, paths)]
        chosen = [name for name in loose or listed if _top(name, paths) not in BESIDE_MODEL]
    if not chosen:
        raise _unclear(where, f"tensors under {printable(key)}" if key else "tensors of a model", listed, paths)
    above = key.count(".") + 1
    deeper = {str(path[above]) for name in chosen if len(path := paths.get(name, ())) > above + 1} if key else set()
    if deeper & BESIDE_MODEL.keys():
        raise _unclear(where, f"one model under {printable(key)}", listed, paths)
    return ModelPlace(key, frozenset(chosen))


def beside_model(names: Iterable[str], paths: Mapping[str, PathInState], key: str) -> tuple[str, ...]:
    """What is beside a model: components of a run, or keys of the other program.

    Args:
        names: of tensors and of other values that are not the model's.
        paths: as in `model_place`.
        key: the keys of the model.

    Examples:
        >>> beside_model(["app.optim.w", "app.model", "epoch"], {"app.optim.w": ("app", "optim", "w")}, "app.model")
        ('optimizer', 'app', 'epoch')
    """
    keys = tuple(key.split(".")) if key else ()
    return tuple(dict.fromkeys(_label(paths.get(name, (_top(name, paths),)), keys) for name in names))


def keys_of_values(values: Mapping[Any, Any], *, top: PathInState = ()) -> Iterator[PathInState]:
    """The keys that lead to each value in nested dicts; see `flattened`, which limits how many these are.

    Examples:
        >>> list(keys_of_values({"model": {"a.weight": 1}, "step": 3}))
        [('model', 'a.weight'), ('step',)]
    """
    for key, each in values.items():
        if isinstance(each, dict) and each:
            yield from keys_of_values(each, top=(*top, key))
        else:
            yield *top, key


def step_of_value(found: Any) -> int | None:
    """A step, from an int or a counter that is a whole number; None for anything else.

    Examples:
        >>> step_of_value(3.0), step_of_value(True), step_of_value(-1)
        (3, None, None)
    """
    if type(found) is float and found.is_integer():
        found = int(found)
    return found if type(found) is int and found >= 0 else None


def _usual_key(listed: list[str], paths: Mapping[str, PathInState], where: str) -> str:
    """The key of the model, if there is one answer."""
    loose, keys = list[str](), set[str | int]()
    for name in listed:  # there may be many
        path = paths.get(name)
        if path is None or len(path) == 1:
            loose.append(name)
        else:
            keys.add(path[0])
    tops, held = {_top(name, paths) for name in loose}, set(map(str, keys))
    usual = [each for each in MODEL_KEYS if each in held]
    if len(usual) == 1 and usual[0] not in tops:
        return usual[0]
    # names of which the keys are not known may be those of a nested state
    is_open = tops & BESIDE_MODEL.keys() or any(name not in paths and _top(name, paths) in MODEL_KEYS for name in loose)
    if not usual and not is_open and held <= BESIDE_MODEL.keys() and set(loose) - set(STEPS):
        return ""
    raise _unclear(where, "one key of the model", listed, paths)


def _unclear(where: str, expected: str, listed: list[str], paths: Mapping[str, PathInState]) -> InvalidArgument:
    keys = dict.fromkeys(_candidate(name, paths) for name in listed)
    shown = [printable(each) for each in keys if each][:_SHOWN] + (["the top"] if "" in keys else [])
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return InvalidArgument(
        where, expected=expected, found=f"tensors under {', '.join(shown)}{more}" if shown else "no tensor",
        fix=f"name it: --key {shown[0]}; or --key '' if the names of the model are at the top" if shown else "see trainfold inspect")  # fmt: skip


def _candidate(name: str, paths: Mapping[str, PathInState]) -> str:
    """The keys under which a tensor is: two at most, as there are usually no more above a model."""
    path = paths.get(name)
    if path is None:
        return name.partition(".")[0] if "." in name else ""
    return ".".join(map(str, path[: min(len(path) - 1, 2)]))


def _is_loose(name: str, paths: Mapping[str, PathInState]) -> bool:
    """Whether a tensor is at the top, as far as that is known."""
    return len(paths.get(name, ("",))) == 1


def _top(name: str, paths: Mapping[str, PathInState]) -> str:
    path = paths.get(name, ())
    return str(path[0]) if len(path) > 1 else name.partition(".")[0]


def _label(path: PathInState, keys: tuple[str, ...]) -> str:
    """What is beside the model, from where its keys part from those of the model."""
    common = 0
    while common < min(len(keys), len(path) - 1) and str(path[common]) == keys[common]:
        common += 1
    return BESIDE_MODEL.get(str(path[common]), ".".join(map(str, path[: common + 1])))

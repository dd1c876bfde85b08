"""What a script gave the modules of a model, as plain values for the resume contract: the ``p`` of a Dropout, a stride, an activation (W08)."""

import re
import types
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final

import torch

from trainfold.adapters.own_state.attributes import attributes
from trainfold.core.digest import digest_of
from trainfold.core.json_values import Json, canonical_json, encode_scalar
from trainfold.core.state.fqn import canonical_name

_OF_MODULES: Final = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl", "_version"})
# What the shapes of its tensors say of a module as well: those are refused, and a person is told the cause alone.
_OF_SHAPES: Final = frozenset(
    {"in_features", "out_features", "in_channels", "out_channels", "num_features", "normalized_shape", "num_channels"}
    | {"num_embeddings", "embedding_dim", "input_size", "hidden_size", "num_layers", "num_parameters", "embed_dim"}
    | {"kdim", "vdim", "in1_features", "in2_features", "proj_size", "bidirectional", "head_dim"}
)
_WRAPPERS: Final = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
_NUMBERED: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST: Final = 256  # places in a model that are named
_LONG: Final = 64
_NUMBERS: Final = (bool, int, float)
_TEXTS: Final = (str, type(None))
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType)
_NONE: Any = object()


def settings_of_modules(root: torch.nn.Module, path: str) -> dict[str, Json]:
    """Contract key -> plain value, for the settings of a model's submodules, as they were when it was attached.

    Of torch's own modules their class counts, and each plain public attribute that no shape shows; of somebody's class each number, since
    a text may be the path of a log. Modules that differ by their number alone share one key, with ``*`` for the number: where
    they are alike, its value is that of each. No code of the modules runs.

    Args:
        root: the model.
        path: what the keys begin with.

    Examples:
        >>> settings_of_modules(torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Dropout(0.1)), "m")
        {'m.*': {'inplace': False, 'kind': 'Dropout', 'p': 0.1}}
        >>> settings_of_modules(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.GELU()), "m")["m.*"]["kind"]
        ['ReLU', 'GELU']
    """
    alike: dict[str, list[dict[str, Json]]] = {}
    for place, module in _places(root):
        if place and (settings := dict(_settings(module))):
            alike.setdefault(_NUMBERED.sub("*", place), []).append(settings)
    found: dict[str, Json] = {f"{path}.{place}": _together(each) for place, each in sorted(alike.items())}
    if len(found) > _MOST:
        rest = dict(list(found.items())[_MOST:])
        found = {key: value for key, value in found.items() if key not in rest}
        found[f"{path}.(more)"] = f"{len(rest)} places, {digest_of(canonical_json(rest))}"
    return found


def settings_of_root(root: torch.nn.Module, path: str) -> dict[str, Json]:
    """The same for the model itself, a key for each setting.

    Examples:
        >>> settings_of_root(torch.nn.Dropout(0.1), "m")
        {'m.kind': 'Dropout', 'm.p': 0.1, 'm.inplace': False}
    """
    outermost = takewhile(lambda found: not found[0], _places(root))  # what lies in them comes after them
    return {f"{path}.{key}": value for _, module in outermost for key, value in _settings(module)}


def _places(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module by its path without the wrappers, which are none of them."""
    for name, module in root.named_modules():
        if not type(module).__module__.startswith(_WRAPPERS):
            yield canonical_name(f"{name}._")[:-2] if name else "", module


def _settings(module: torch.nn.Module) -> Iterator[tuple[str, Json]]:
    kind = type(module)
    is_torchs = kind.__module__.startswith("torch.")
    if is_torchs:
        yield "kind", kind.__qualname__
    for dotted, value in attributes(module):
        name = dotted[1:]
        if name in _OF_MODULES or (is_torchs and (name[:1] == "_" or name in _OF_SHAPES)):
            continue
        if (plain := _plain(value, texts=is_torchs)) is not _NONE:
            yield name, plain


def _together(each: list[dict[str, Json]]) -> Json:
    """What several modules say, by setting: one value where they are alike, and all of them in their order where they are not."""
    said: dict[str, Json] = {}
    for name in sorted({name for one in each for name in one}):
        values = [one.get(name) for one in each]
        if all(value == values[0] for value in values):
            said[name] = values[0]
        else:
            said[name] = (
                values if len(values) <= _LONG else f"{len(values)} values, {digest_of(canonical_json(values))}"
            )
    return said


def _plain(value: Any, *, texts: bool) -> Any:
    """The JSON form of a number, of a function by its name, and of short rows of them; `_NONE` for all else."""
    kind = type(value)  # a proxy may run code where it is asked for its class
    if kind in _NUMBERS or (texts and kind in _TEXTS):
        return encode_scalar(value, "module")
    if texts and kind in _FUNCTIONS:
        return str(value.__qualname__)
    if kind in (list, tuple) and 0 < len(value) <= _LONG:
        row = [_plain(each, texts=texts) for each in value]
        return _NONE if any(each is _NONE for each in row) else row
    return _NONE

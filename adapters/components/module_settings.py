"""Settings of the modules of a model, as plain values for the resume contract: the ``p`` of a Dropout, a stride, an activation."""

import types
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final

import torch

from trainfold.adapters.own_state.attributes import attributes
from trainfold.adapters.sharded.dtensor import FSDP_ATTRIBUTES, own_class
from trainfold.core.format.structure.united_contract import PLACES, settings_of_places
from trainfold.core.json_values import Json, encode_scalar
from trainfold.core.state.names.wrapper_names import path_in, short_path_in

_OF_MODULES: Final = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl", "_version"})
# Settings that also show in the shapes of the tensors: a resume refuses the shapes, and so reports one cause only.
_OF_SHAPES: Final = frozenset(
    {"in_features", "out_features", "in_channels", "out_channels", "num_features", "normalized_shape", "num_channels"}
    | {"num_embeddings", "embedding_dim", "input_size", "hidden_size", "num_layers", "num_parameters", "embed_dim"}
    | {"kdim", "vdim", "in1_features", "in2_features", "proj_size", "bidirectional", "head_dim"}
)
_WRAPPERS: Final = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "torch.export.")
_LONG: Final = 64
_NUMBERS: Final = (bool, int, float)
_TEXTS: Final = (str, type(None))
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType)
_NONE: Any = object()


def settings_of_modules(root: torch.nn.Module, path: str, *, is_part: bool = False) -> dict[str, Json]:
    """Return contract key -> plain value, for the settings of a model's submodules when it was attached.

    For torch's own modules these are the class and each plain public attribute that does not show in a shape. For other classes these are
    the numbers only, because a string may be the path of a log. Modules whose names differ only in a number share one key, with ``*`` for
    the number; if their values are equal, the key has one value. No code of the modules runs.

    Args:
        root: the model.
        path: the prefix of the keys.
        is_part: whether other ranks have other parts of the model: then there is one key, and the parts are put together at a save and a load.

    Examples:
        >>> settings_of_modules(torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Dropout(0.1)), "m")
        {'m.*': {'inplace': False, 'kind': 'Dropout', 'p': 0.1}}
        >>> settings_of_modules(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.GELU()), "m")["m.*"]["kind"]
        ['ReLU', 'GELU']
    """
    places: dict[str, dict[str, Json]] = {}
    for place, name, module in _places(root):
        if place and (settings := dict(_settings(module))):
            places[place if place not in places else path_in(root, name)] = settings
    return {f"{path}.{PLACES}": places} if is_part else settings_of_places(path, places)


def settings_of_root(root: torch.nn.Module, path: str) -> dict[str, Json]:
    """Return the same for the model itself, with one key for each setting.

    Examples:
        >>> settings_of_root(torch.nn.Dropout(0.1), "m")
        {'m.kind': 'Dropout', 'm.p': 0.1, 'm.inplace': False}
    """
    outermost = takewhile(lambda found: not found[0], _places(root))  # their submodules come after them
    return {f"{path}.{key}": value for _, _, module in outermost for key, value in _settings(module)}


def _places(root: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """Yield each module with its path without all that could be the prefix of a wrapper, as checkpoints have it (ADR-0056), and its path; without wrappers."""
    for name, module in root.named_modules():
        if not own_class(module).__module__.startswith(_WRAPPERS):
            yield short_path_in(root, name), name, module


def _settings(module: torch.nn.Module) -> Iterator[tuple[str, Json]]:
    kind = own_class(module)
    is_torchs = kind.__module__.startswith("torch.")
    if is_torchs:
        yield "kind", kind.__qualname__
    for dotted, value in attributes(module):
        name = dotted[1:]
        if (
            name in _OF_MODULES
            or name.startswith(FSDP_ATTRIBUTES)
            or (is_torchs and (name[:1] == "_" or name in _OF_SHAPES))
        ):
            continue
        if (plain := _plain(value, texts=is_torchs)) is not _NONE:
            yield name, plain


def _plain(value: Any, *, texts: bool) -> Any:
    """Return the JSON form of a number, a function (its name), or a short row of these; `_NONE` for everything else."""
    kind = type(value)  # not isinstance, for which a proxy may run code
    if kind in _NUMBERS or (texts and kind in _TEXTS):
        return encode_scalar(value, "module")
    if texts and kind in _FUNCTIONS:
        return str(value.__qualname__)
    if kind in (list, tuple) and 0 < len(value) <= _LONG:
        row = [_plain(each, texts=texts) for each in value]
        return _NONE if any(each is _NONE for each in row) else row
    return _NONE

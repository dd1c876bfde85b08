"""`model_in_dcp` and `model_in_torch`: the model in what torch has written, the step, and what else is there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch

from trainfold.backends.weights.foreign.dcp_directory import DcpDirectory
from trainfold.backends.weights.foreign.torch_file import TorchFile
from trainfold.backends.weights.opened import opened_weights
from trainfold.core.errors import CheckpointHostile
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import whole_box
from trainfold.core.torch_files.dcp_metadata import PathInState
from trainfold.core.torch_files.model_place import (
    STEPS,
    ModelPlace,
    beside_model,
    keys_of_values,
    model_place,
    step_of_value,
)
from trainfold.core.weights.open_weights import OpenWeights
from trainfold.core.weights.source import ListedSource, Wanted

_ONE: Final = ((), (1,))


@final
@attrs.frozen
class FoundModel:
    """What is in a directory or a file.

    Attributes:
        model: its model.
        step: its step, if it says one.
        others: what is beside the model: components of a run, or keys of another program.
    """

    model: ListedSource
    step: int | None
    others: tuple[str, ...]


def model_in_dcp(path: Path, key: str | None) -> FoundModel:
    """Look into a directory of `torch.distributed.checkpoint`. Of its objects only the step is read: the others may be of any class.

    Args:
        path: the directory.
        key: the keys of the model; see `model_place`.

    Raises:
        InvalidArgument: as `model_place` raises it.
        CheckpointError: the matching subclass; see `DcpDirectory`.
    """
    whole = DcpDirectory(path)
    specs, objects, paths = whole.specs(), whole.metadata.objects, whole.metadata.paths
    place = model_place(specs, paths, key=key, where=str(path))

    def value_of(name: str) -> Any:
        if name in objects:
            with suppress(CheckpointHostile):  # of a class of the other program
                return whole.object_of(name)
        spec = specs.get(name)
        if spec is None or name in place.names or spec.shape not in _ONE:
            return None
        wanted = {name: Wanted(spec.dtype, spec.shape, whole_box(spec.shape))}
        return next(tensor.item() for _, tensor in whole.supply(wanted))

    model = whole.under(place.key)
    part = model if len(model.specs()) == len(place.names) else _Part(model, place.names)
    return _found(part, place, [*specs, *objects], paths, value_of)


def model_in_torch(path: Path, key: str | None) -> FoundModel:
    """Look into a file of `torch.save`.

    Args:
        path: the file.
        key: the keys of the model; see `model_place`.

    Raises:
        InvalidArgument: as `model_place` raises it.
        CheckpointError: the matching subclass; see `TorchFile`.
    """
    file = TorchFile(path)
    tensors = file.tensor_names()
    paths = {
        f"{keys[0]}.{keys[1]}" if len(keys) == 2 else ".".join(map(str, keys)): keys
        for keys in keys_of_values(file.at(""))
    }
    place = model_place(tensors, paths, key=key, where=str(path))
    model = TorchFile(path, prefix=place.key) if place.key else file.part(place.names)
    return _found(
        model, place, list(paths), paths,
        lambda name: file.at(name) if name in paths and name not in place.names else None)  # fmt: skip


def _found(
    model: ListedSource,
    place: ModelPlace,
    names: list[str],
    paths: Mapping[str, PathInState],
    value_of: Callable[[str], Any],
) -> FoundModel:
    steps = {name: found for name in STEPS if (found := step_of_value(value_of(name))) is not None}
    beside = [name for name in names if name not in place.names and name not in steps]
    return FoundModel(
        model,
        next(iter(steps.values()), None),
        beside_model(beside, paths, place.key),
    )


@final
@attrs.frozen
class _Part:
    """Some tensors of a source, under its names."""

    source: ListedSource
    names: frozenset[str] = attrs.field(repr=False)

    def specs(self) -> dict[str, LeafSpec]:
        return {name: each for name, each in self.source.specs().items() if name in self.names}

    def supply(self, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
        return self.source.supply({name: each for name, each in wanted.items() if name in self.names})

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        with opened_weights(self.source) as whole:
            specs = {name: each for name, each in whole.specs.items() if name in self.names}
            yield attrs.evolve(whole, specs=specs)

"""`LoaderExtras`: the components under ``extra`` that a loader's batches may draw from or change."""

import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader

from trainfold.adapters.batches.feed import OTHER, generators_of, mismatch
from trainfold.adapters.components.component import ComponentAdapter, ObjectPart, TreePart, copied
from trainfold.adapters.own_state.attributes import held_by
from trainfold.adapters.own_state.read_back import first_unequal
from trainfold.adapters.streams.generator import GeneratorPart
from trainfold.adapters.streams.rng_streams import preserved_rng
from trainfold.adapters.streams.stream_reader import StreamReader, set_streams
from trainfold.core import tree
from trainfold.core.errors import TrainfoldError
from trainfold.core.json_values import SCALARS
from trainfold.core.state.state import Opaque

KEY: Final = "extra"  # the key of these values among the streams of a batch
_DEPTH: Final = 3
_MOST_OBJECTS: Final = 2000
_MOST_LEAVES: Final = 1000
_MOST_BYTES: Final = 1 << 16


@final
class LoaderExtras:
    """The generators, objects and pairs of functions under ``extra``, as a loader sees them.

    A dataset or a sampler may draw from one of them. The components that the loader visibly references are read for each
    batch, so that the batch can be drawn again from the same values. All others are only put back.

    Args:
        loader: the loader; its dataset, samplers and collate function are searched for references.
    """

    def __init__(self, loader: Any) -> None:
        # weak: a sampler's tap references this object, and a loader in a cycle would keep its workers until a collection
        self._loader = weakref.ref(loader) if isinstance(loader, DataLoader) else lambda: None
        self._reader: StreamReader | None = None
        self._all: Mapping[str, ComponentAdapter] = {}
        self._parts: dict[str, ComponentAdapter] = {}
        self._near: dict[str, ComponentAdapter] = {}
        self._seen = -1

    def attend(self, parts: Mapping[str, ComponentAdapter]) -> None:
        """Use these components of the run, which are neither modules nor optimizers; the dict may grow later."""
        self._all, self._seen = parts, -1

    def now(self) -> dict[str, Any]:
        """The values that the next batch may be drawn from: the small components that the loader references."""
        if self._seen != len(self._all):
            self._look()
        if not self._near:
            return {}
        found: dict[str, Any] = {}
        for name, part in list(self._near.items()):
            value = self._quietly(part)
            if value is None:
                continue  # its owner cannot return it yet
            if _is_small(value[0]):
                found[name] = value[0]
            else:
                del self._near[name]
        return found

    def _quietly(self, part: ComponentAdapter) -> tuple[Any] | None:
        """Copy a component's value; if the user's code draws random numbers to return it, the streams are put back."""
        if isinstance(part, GeneratorPart):
            return (_value_of(part),)
        if self._reader is None:
            self._reader = StreamReader()
        self._reader.moved()
        streams = self._reader.streams
        value = _read(part)
        if self._reader.moved():
            set_streams(streams)
        return value

    def at_start(self) -> dict[str, Any]:
        """The values that an epoch's order may be drawn from: those of `now`, and every generator."""
        found = self.now()
        for name, part in self._parts.items():
            if isinstance(part, GeneratorPart) and name not in found:
                found[name] = part.capture().value
        return found

    def write(self, values: Mapping[str, Any]) -> None:
        """Write the given values where they differ."""
        for name, value in values.items():
            part = self._all.get(name)
            if part is not None and first_unequal(value, _value_of(part), name) is not None:
                part.write(Opaque(value))

    def differs(self, name: str, value: Any) -> bool:
        """Whether a component's value is now a different one."""
        part = self._parts.get(name)
        return part is not None and first_unequal(value, _value_of(part), name) is not None

    @contextmanager
    def kept(self, *, everything: bool = True) -> Iterator["KeptExtras"]:
        """Run a block and put every component back afterwards.

        Args:
            everything: all components; False for those of `at_start` only.
        """
        if self._seen != len(self._all):
            self._look()
        kept = KeptExtras(self._parts if everything else {name: self._parts[name] for name in self.at_start()})
        try:
            yield kept
        finally:
            kept.put_back()

    def problems(self, values: Any, *, where: str) -> list[TrainfoldError]:
        """List every reason why values from a position cannot be written."""
        if not isinstance(values, dict):
            return [mismatch(where, "values by the name of a component", repr(values)[:80], OTHER)]
        found: list[TrainfoldError] = []
        for name, value in values.items():
            if name in self._all:
                problems = self._all[name].problems(Opaque(value))
                found.extend(mismatch(f"{where}[{name!r}]", each.expected, each.found, each.fix) for each in problems)
        return found

    def _look(self) -> None:
        self._seen = len(self._all)
        own = {id(each) for each in generators_of(self._loader()).values()}  # the feed itself puts these back
        self._parts = {
            name: part
            for name, part in self._all.items()
            if not (isinstance(part, GeneratorPart) and id(part.target) in own)
        }
        reached = _reached(_roots(self._loader()), names=False) if self._parts else {}
        self._near = {name: part for name, part in self._parts.items() if _is_near(part, reached)}


@final
class KeptExtras:
    """The values that components had before a block.

    Args:
        parts: the components, by name.
    """

    def __init__(self, parts: Mapping[str, ComponentAdapter]) -> None:
        self._before: dict[str, tuple[ComponentAdapter, Any]] = {}
        with preserved_rng():
            for name, part in parts.items():
                value = _read(part)
                if value is not None:
                    self._before[name] = part, tree.map_tensors(_on_host, value[0])

    def leave(self, names: set[str]) -> None:
        """Leave these as the block left them."""
        for name in names:
            self._before.pop(name, None)

    def changed(self) -> list[str]:
        """The components whose values have changed."""
        with preserved_rng():
            return [
                name
                for name, (part, value) in self._before.items()
                if (now := _read(part)) is not None and first_unequal(value, now[0], name) is not None
            ]

    def drawn_from(self) -> list[str]:
        """The components that the block has changed, without those that change by themselves, such as a clock."""
        with preserved_rng():
            return [name for name in self.changed() if _is_steady(self._before[name][0])]

    def put_back(self) -> None:
        """Put back the changed components."""
        for name in self.changed():
            part, value = self._before[name]
            with preserved_rng():
                part.write(Opaque(value))


def streams_only(before: Any) -> Any:
    """The streams of a batch, without the components under ``extra``.

    Examples:
        >>> streams_only({"torch": 1, "extra": {"noise": 2}})
        {'torch': 1}
    """
    return {name: value for name, value in before.items() if name != KEY} if isinstance(before, dict) else before


def is_loader_extra(part: ComponentAdapter) -> bool:
    """Whether a component is a generator, an object or a pair of functions."""
    return isinstance(part, GeneratorPart | ObjectPart | TreePart)


def _value_of(part: ComponentAdapter) -> Any:
    value = part.capture()
    return value.value if isinstance(value, Opaque) else value


def _read(part: ComponentAdapter) -> tuple[Any] | None:
    """Copy a component's value; None if its owner cannot return it yet."""
    try:
        value = _value_of(part)
        return (value if _is_constant(value) else copied(value),)
    except Exception:  # noqa: BLE001 - the user's code may raise anything; a save reports it
        return None


def _is_steady(part: ComponentAdapter) -> bool:
    one, other = _read(part), _read(part)
    return one is not None and other is not None and first_unequal(one[0], other[0], "extra") is None


def _is_small(value: Any) -> bool:
    """Whether a value is small and on the host, since it is read for each batch."""
    if type(value) in SCALARS:
        return True
    leaves = tree.leaves(value)
    size = sum(getattr(leaf, "nbytes", 8) for leaf in leaves)
    on_host = all(leaf.is_cpu for leaf in leaves if isinstance(leaf, torch.Tensor))
    return len(leaves) <= _MOST_LEAVES and size <= _MOST_BYTES and on_host


def _is_constant(value: Any) -> bool:
    return type(value) in SCALARS or (type(value) is tuple and all(map(_is_constant, value)))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu else tensor.cpu()


def _is_near(part: ComponentAdapter, reached: Mapping[int, Any]) -> bool:
    if isinstance(part, GeneratorPart | ObjectPart):
        return id(part.target) in reached
    if not isinstance(part, TreePart):
        return False
    return not reached.keys().isdisjoint(_reached([part.get, part.set], names=True, depth=2))


def _roots(loader: Any) -> list[Any]:
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "dataset", None), sampler, batch_sampler, getattr(loader, "collate_fn", None))
    return [each for each in found if each is not None]


def _reached(roots: list[Any], *, names: bool, depth: int = _DEPTH) -> dict[int, Any]:
    """The objects reachable through attributes, containers and closures, by id."""
    found: dict[int, Any] = {id(each): each for each in roots}
    level = list(roots)
    for _ in range(depth):
        held = [child for each in level for _, child in held_by(each, names=names)]
        level = [child for child in held if id(child) not in found and _may_be_shared(child)]
        found.update((id(child), child) for child in level)
        if len(found) > _MOST_OBJECTS:
            break
    return found


def _may_be_shared(value: Any) -> bool:
    plain = (torch.Tensor, torch.dtype, torch.device, types.ModuleType, type, bytes, complex)
    return type(value) not in SCALARS and value is not None and not isinstance(value, plain)

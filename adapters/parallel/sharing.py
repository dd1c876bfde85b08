"""`Sharing`: what the ranks of a live run have in common, as it was declared: components under ``extra``, and buffers of modules."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, final

import attrs
import torch

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.backends.side.side_files import SideFiles
from trainfold.core.checks import choice
from trainfold.core.errors import InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.json_values import shown
from trainfold.core.layout.parallelism import Parallelism
from trainfold.core.state.fqn import NamedTensors, named_tensors
from trainfold.core.state.state import OfRankZero, Opaque, PerRank

Shared = Literal["replicated", "rank_0", "each_share", "each_rank"]
_KINDS: Final = ("replicated", "rank_0", "each_share", "each_rank")
_OF_BUFFERS: Final = ("replicated", "rank_0", "each_rank")
_OF_SETTINGS: Final = ("replicated", "each_rank")
_SENT: Final = "declared to be rank 0's"


@final
class Sharing:
    """What was declared. Without a declaration a component is replicated: equal on all ranks, and compared.

    Args:
        declared: component, ``component.buffers``, ``component.settings``, or the leaf path of a buffer -> how it is shared.
        objects: the objects of components that may be declared. Of a module, buffers may be; of an optimizer, nothing.
        ranks: returns how the ranks train, for shares of the data.

    Raises:
        InvalidArgument: for a name or a way that there is not.
    """

    def __init__(
        self,
        declared: Mapping[str, Shared] | None,
        *,
        objects: Mapping[str, Any],
        ranks: Callable[[], Parallelism],
    ) -> None:
        self._ranks = ranks
        self._modules = modules = {name: each for name, each in objects.items() if isinstance(each, torch.nn.Module)}
        self._components: dict[str, str] = {}
        self._buffers: dict[str, str] = {}
        self._settings: dict[str, str] = {}
        if not isinstance(declared, Mapping | None):
            raise InvalidArgument(
                "sharing", expected="a dict", found=shown(declared), fix='pass such as {"meter": "each_rank"}'
            )
        closed = torch.nn.Module | torch.optim.Optimizer | SideFiles
        plain = [name for name, each in objects.items() if not isinstance(each, closed)]
        for name, how in (declared or {}).items():
            of_module = name.partition(".buffers")[0] if ".buffers" in name else None
            where = f"sharing[{name!r}]"
            if name in plain:
                choice(where, how, _KINDS, fix="pass one of these")
                self._components[name] = how
            elif of_module in modules:
                choice(where, how, _OF_BUFFERS, fix="pass one of these")
                self._buffers[name] = how
            elif name.removesuffix(".settings") in objects and name not in objects:
                choice(where, how, _OF_SETTINGS, fix="pass one of these")
                self._settings[name.removesuffix(".settings")] = how
            else:
                raise InvalidArgument(
                    where,
                    expected=f"a component among {plain}, settings such as 'model.settings', or buffers such as 'model.buffers' or \"model.buffers['bn.running_mean']\"",
                    found=name,
                    fix="declare what is under extra= and is neither a module, an optimizer nor files; those are replicated, cut over the ranks, or rank 0's",
                )
        for component in self._modules:
            if self._of_each_rank(component) and f"{component}_buffers" in objects:
                raise InvalidArgument(
                    f"extra['{component}_buffers']",
                    expected="a name that is free",
                    found="the name of the component for the buffers of each rank",
                    fix="choose another name",
                )

    def add(self, other: "Sharing") -> None:
        """Take what was declared of one more object."""
        self._modules |= other._modules  # noqa: SLF001
        self._components |= other._components  # noqa: SLF001
        self._buffers |= other._buffers  # noqa: SLF001
        self._settings |= other._settings  # noqa: SLF001

    @property
    def names(self) -> tuple[str, ...]:
        """The components that the declaration adds."""
        return tuple(f"{each}_buffers" for each in self._modules if self._of_each_rank(each))

    @property
    def own_settings(self) -> frozenset[str]:
        """The components whose settings each rank has of its own."""
        return frozenset(name for name, how in self._settings.items() if how == "each_rank")

    def parts(self, parts: Mapping[str, ComponentAdapter]) -> dict[str, ComponentAdapter]:
        """The components of a run as they are shared.

        Args:
            parts: the components, each as its object has it.
        """
        if not self._components and not self._buffers:
            return dict(parts)
        found: dict[str, ComponentAdapter] = {}
        for name, part in parts.items():
            how = self._components.get(name, "replicated")
            found[name] = part if how == "replicated" else SharedPart(part, how, self._ranks)
            if name in self._modules and (names := self._of_each_rank(name)):
                found[f"{name}_buffers"] = BuffersOfRank(self._modules[name], names, f"{name}_buffers")
        return found

    def sent(self, modules: Mapping[str, NamedTensors]) -> dict[str, str]:
        """The buffers whose value on rank 0 counts: leaf path -> a text, which the ranks compare in place of the value.

        Args:
            modules: component -> the tensors of its module.
        """
        return {
            path: _SENT
            for component, named in (modules.items() if self._buffers else ())
            for name in named.buffers
            if self._how(component, path := f"{component}.buffers[{name!r}]") != "replicated"
        }

    def _of_each_rank(self, component: str) -> list[str]:
        if "each_rank" not in self._buffers.values():
            return []
        names = named_tensors(self._modules[component]).buffers
        return [name for name in names if self._how(component, f"{component}.buffers[{name!r}]") == "each_rank"]

    def _how(self, component: str, path: str) -> str:
        return self._buffers.get(path, self._buffers.get(f"{component}.buffers", "replicated"))


@final
@attrs.frozen
class SharedPart:
    """The adapter of a component that is shared in a declared way.

    Args:
        part: the adapter of the component.
        how: the way.
        ranks: returns how the ranks train.
    """

    part: ComponentAdapter
    how: str
    ranks: Callable[[], Parallelism]

    def capture(self) -> Any:
        """The value, in the node that says whose it is."""
        value = self.part.capture()
        if self.how == "rank_0":
            return OfRankZero(value)
        if self.how == "each_rank":
            return PerRank(value)
        here = self.ranks().coordinates.data
        return PerRank(value, here.rank, here.size)

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why the value cannot be written; a value that was saved before the declaration can be."""
        return self.part.problems(_value_of(saved))

    def write(self, saved: Any) -> Undo:
        """Write the value."""
        return self.part.write(_value_of(saved))


@final
@attrs.frozen
class BuffersOfRank:
    """The adapter of buffers of which each rank has its own; the model itself has those of rank 0.

    Args:
        module: that has them.
        names: of the buffers.
        path: of the component.
    """

    module: torch.nn.Module
    names: list[str]
    path: str

    def capture(self) -> PerRank:
        """The buffers of this rank."""
        return PerRank(Opaque(self._now()))

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why the value is not these buffers."""
        value = _value_of(saved)
        found = value.value if isinstance(value, Opaque) else None
        now = {name: tuple(each.shape) for name, each in self._now().items()}
        have = (
            {name: tuple(getattr(each, "shape", ())) for name, each in found.items()} if isinstance(found, dict) else {}
        )
        if have == now:
            return []
        return [
            InvalidState(
                self.path, expected=f"buffers {now}", found=have, fix="build the model as it was when it was saved"
            )
        ]

    def write(self, saved: Any) -> Undo:
        """Write the buffers; the undo writes back what was there."""
        value, now = _value_of(saved).value, self._now()
        before = {name: each.detach().clone() for name, each in now.items()}

        def put(values: Mapping[str, torch.Tensor]) -> None:
            with torch.no_grad():
                for name, each in now.items():
                    each.copy_(values[name])

        put(value)
        return lambda: put(before)

    def _now(self) -> dict[str, torch.Tensor]:
        every = named_tensors(self.module).buffers
        return {name: every[name] for name in self.names}


def _value_of(saved: Any) -> Any:
    return saved.value if isinstance(saved, PerRank | OfRankZero) else saved

"""`SwapProbe`: refuses to save a model while it contains the averaged weights of an attached object."""

from collections.abc import Mapping
from typing import Any, Final, final

import attrs
import torch

from trainfold.adapters.own_state.attributes import SEQUENCES, attributes
from trainfold.adapters.sharded.dtensor import local_part
from trainfold.core.errors import SwappedWeights
from trainfold.core.state.fqn import named_tensors
from trainfold.core.state.names.wrapper_names import under_names_of

_PROBES: Final = 4
_PROBE_NUMEL: Final = 1 << 16
_KEPT: Final = 16  # elements kept of each probe


@final
@attrs.frozen(eq=False)
class _Twin:
    """Where an attached object keeps its own copy of a parameter; the tensor there may be a different one each time."""

    holder: Any
    key: Any

    def tensor(self) -> torch.Tensor | None:
        try:
            found = self.holder[self.key]
        except (LookupError, TypeError):
            return None
        return found if isinstance(found, torch.Tensor) else None


@final
class SwapProbe:
    """Copies, at each step, the first elements of a few small parameters of the model and of every average of it.

    Suppose that, at a save, the model's elements have changed since the last step and now equal those that an average had at
    that step. Then the averaged weights are in the model, and the raw weights, which training needs, would not be saved.
    Nothing else changes weights like this: a step moves the average too, and a write between two steps leaves other bits.

    An average is an attached module with parameters of the same names and shapes, such as ``AveragedModel``, or an object
    with an attribute that lists them in the order of the parameters or maps their names to them. Not seen: an average behind
    a pair of functions, and one that is updated between ``advance`` and the swap.

    Args:
        model: the model of the run.
        extra: the other attached objects.
    """

    def __init__(self, model: torch.nn.Module, extra: Mapping[str, Any]) -> None:
        named = named_tensors(model).params
        small = [each for each in named.items() if _is_probe(each[1])]
        self._probes = sorted(small, key=lambda each: each[1].numel())[:_PROBES]
        self._twins = {name: found for name, target in extra.items() if (found := self._twins_in(target, named))}
        self._kept: list[torch.Tensor] | None = None
        self._views: list[torch.Tensor] = []
        self._places: list[int] = []

    def stepped(self) -> None:
        """Copy the current elements of the model and of the averages."""
        if self._twins:
            with torch.no_grad():
                now = self._now()
                if self._kept is None or [each.shape for each in now] != [each.shape for each in self._kept]:
                    self._kept = [each.clone() for each in now]
                else:
                    torch._foreach_copy_(self._kept, now)

    def check(self) -> None:
        """Refuse the save if the averaged weights are in the model.

        Raises:
            SwappedWeights: if they are; it names the average.
        """
        if not self._twins or self._kept is None:
            return
        then, now = self._by_object(self._kept), self._by_object(self._now())
        moved = [i for i, (a, b) in enumerate(zip(then["model"], now["model"], strict=True)) if not _same(a, b)]
        for name in self._twins if moved else ():
            if all(_same(now["model"][i], then[name][i]) for i in moved):
                raise SwappedWeights(
                    "model",
                    expected="the weights that training continues with",
                    found=f"the weights that {name} had at the last advance(), for example in {self._probes[moved[0]][0]}",
                    fix=f"swap the averaged weights out before you save: {name} is saved as a component of its own; to keep them in "
                    "the model for good, copy them before live.advance()",
                )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _now(self) -> list[torch.Tensor]:
        found: list[torch.Tensor | None] = [parameter for _, parameter in self._probes]
        for twins in self._twins.values():
            found += [each.tensor() for each in twins]
        tensors = [_EMPTY if each is None else local_part(each) for each in found]
        places = [each.data_ptr() for each in tensors]
        if places != self._places:  # a view keeps its memory alive, so no other tensor can get its address
            self._views, self._places = [each.detach().reshape(-1)[:_KEPT] for each in tensors], places
        return self._views

    def _by_object(self, values: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        size = len(self._probes)
        return {name: values[i * size : (i + 1) * size] for i, name in enumerate(("model", *self._twins))}

    def _twins_in(self, target: Any, named: Mapping[str, torch.Tensor]) -> list[_Twin]:
        """Where an object keeps its copies of the probed parameters; empty unless it has all of them."""
        if isinstance(target, torch.nn.Module):
            theirs = under_names_of(named, named_tensors(target).params)
            return self._chosen(theirs, {name: _Twin(theirs, name) for name, _ in self._probes})
        orders = [list(named), [name for name, each in named.items() if each.requires_grad]]
        for _, held in attributes(target):
            if isinstance(held, dict):
                found = self._chosen(held, {name: _Twin(held, name) for name, _ in self._probes})
            elif isinstance(held, SEQUENCES):
                order = next((each for each in orders if len(each) == len(held)), [])
                places = {name: _Twin(held, order.index(name)) for name, _ in self._probes} if order else {}
                found = self._chosen(dict(zip(order, held, strict=bool(order))), places)
            else:
                continue
            if found:
                return found
        return []

    def _chosen(self, held: Mapping[str, Any], places: Mapping[str, _Twin]) -> list[_Twin]:
        fits = [
            isinstance(found := held.get(name), torch.Tensor)
            and found is not own
            and found.is_contiguous()
            and found.shape == own.shape
            and found.dtype == own.dtype
            for name, own in self._probes
        ]
        return [places[name] for name, _ in self._probes] if fits and all(fits) else []


_EMPTY: Final = torch.empty(0)


def _is_probe(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and 0 < parameter.numel() <= _PROBE_NUMEL and parameter.is_contiguous()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)

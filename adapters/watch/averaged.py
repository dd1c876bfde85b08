"""`Averaged`: averaged weights in the model for an evaluation, with the trained ones kept aside. `SwapsAverages`: the part of a live run that does it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch

from trainfold.adapters.sharded.dtensor import local_part, named_shards
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.names.wrapper_names import under_names_of
from trainfold.core.state.state import ModelState


@final
class Averaged:
    """The averaged weights stand in the model, from when it is made until `end`.

    Args:
        model: of the run.
        average: a module with parameters of the same names and shapes, such as ``AveragedModel``. Buffers that it has too are taken as well.
        name: of the average, for messages.

    Raises:
        InvalidArgument: for anything else; nothing was written then.
    """

    def __init__(self, model: torch.nn.Module, average: Any, name: str) -> None:
        if not isinstance(average, torch.nn.Module):
            raise InvalidArgument("live.averaged", expected="the name of an attached module that averages the model", found=repr(name),
                                  fix="swap another object's averages in and out by its own methods, and save before or after")  # fmt: skip
        mine, theirs = named_shards(model), named_shards(average)
        found = under_names_of([*mine.params, *mine.buffers], {**theirs.params, **theirs.buffers})
        pairs = {
            each: (local_part(own), local_part(found[each]))
            for each, own in {**mine.params, **mine.buffers}.items()
            if each in found
        }
        odd = [each for each in mine.params if each not in pairs] + [
            each for each, (a, b) in pairs.items() if a.shape != b.shape
        ]
        if odd:
            raise InvalidArgument("live.averaged", expected=f"in {name} a parameter for each of the model, of the same shape",
                                  found=f"none for {odd[0]!r}", fix="pass the name of the average of this model")  # fmt: skip
        with torch.no_grad():
            self._kept = {each: (own, own.detach().clone()) for each, (own, _) in pairs.items()}
            for own, average_of_it in pairs.values():
                own.copy_(average_of_it)
        self.name = name

    def trained(self, state: ModelState) -> ModelState:
        """A captured model with the trained weights."""
        return attrs.evolve(state, params=self._of(state.params), buffers=self._of(state.buffers))

    def end(self) -> None:
        """Put the trained weights back."""
        with torch.no_grad():
            for own, kept in self._kept.values():
                own.copy_(kept)

    def _of(self, leaves: Mapping[str, Any]) -> Leaves[Any]:
        return Leaves({name: self._leaf(name, leaf) for name, leaf in leaves.items()})

    def _leaf(self, name: str, leaf: Any) -> Any:
        if name not in self._kept:
            return leaf
        kept = self._kept[name][1]
        return attrs.evolve(leaf, tensor=kept) if isinstance(leaf, Shard) else kept


class SwapsAverages:
    """A run whose model may hold averaged weights for a while.

    Attributes:
        swap: these; None while the trained weights are in the model.
        before_writes: gives what waits until memory that is being saved may be written to, or None if the manager that has set it is gone;
            set by a manager that saves in the background.
    """

    swap: Averaged | None = None
    before_writes: Callable[[], Callable[[], None] | None] | None = None

    def attached(self) -> Mapping[str, Any]:
        """Every attached object, by component."""
        raise NotImplementedError

    @contextmanager
    def averaged(self, name: str) -> Iterator[None]:
        """Put averaged weights into the model for the time of a ``with`` block, such as for an evaluation.

        A save inside has the trained weights as ``model`` and the average as its own component, as at any other moment. The trained weights are
        kept in as much memory as they need, and are put back at the end, whatever happens. `advance` and `restore` are refused inside.

        Args:
            name: of an attached module that averages the model, such as ``"ema"`` under ``extra``.

        Raises:
            InvalidArgument: for another object.
            InvalidState: inside another such block.

        Examples:
            >>> import torch, trainfold
            >>> model = torch.nn.Linear(1, 1)
            >>> ema = torch.optim.swa_utils.AveragedModel(model)
            >>> live = trainfold.attach(model, extra={"ema": ema})
            >>> _ = model.weight.data.fill_(5)
            >>> with live.averaged("ema"):
            ...     inside = model.weight.item(), live.capture().model.params["weight"].item()
            >>> inside == (ema.module.weight.item(), 5), model.weight.item()
            (True, 5.0)
        """
        self.check_trained("live.averaged")
        objects = self.attached()
        self._wait_to_write()
        self.swap = Averaged(objects["model"], objects.get(name), name)
        try:
            yield
        finally:
            swap, self.swap = self.swap, None
            self._wait_to_write()
            swap.end()

    def _wait_to_write(self) -> None:
        wait = None if self.before_writes is None else self.before_writes()
        if wait is not None:
            wait()

    def check_trained(self, where: str) -> None:
        """Raise while averaged weights stand in the model.

        Raises:
            InvalidState: naming the average.
        """
        if self.swap is not None:
            raise InvalidState(where, expected="the trained weights in the model", found=f"those of {self.swap.name}",
                               fix="call it after the block of `with live.averaged(...)`")  # fmt: skip

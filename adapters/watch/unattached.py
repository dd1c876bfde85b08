"""`StepWatch`: sees the optimizers that step the parameters of a run and are not attached to it (W13)."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfold.adapters.components.component import kind_of
from trainfold.adapters.own_state.attributes import held_by
from trainfold.core.errors import UnattachedOptimizer

_LOOKED_AT: Final = 20_000
_DEPTH: Final = 8
_SHOWN: Final = 8
_FINE: Final = "fine"
_FOREIGN: Final = "foreign"


@final
class _Watches:
    """Those of the process. Torch has one hook of ours, for good: to remove it in a step would break that step."""

    def __init__(self) -> None:
        self._watches: tuple[weakref.ref[StepWatch], ...] = ()
        self._is_hooked = False

    def add(self, watch: "StepWatch") -> None:
        alive = (each for each in self._watches if each() is not None)
        self._watches = (*alive, weakref.ref(watch))
        if not self._is_hooked:
            register_optimizer_step_post_hook(self._stepped)
            self._is_hooked = True

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for each in self._watches:
            watch = each()
            if watch is not None:
                watch.see(optimizer)


_ALL: Final = _Watches()


@final
class StepWatch:
    """Looks at every optimizer of the process when it steps, by torch's hook for all of them.

    An optimizer is none of the run's business if it has none of its parameters. One that an attached object holds is fine:
    the inner one of a Lookahead, or one whose ``state_dict`` is under ``extra``. Any other one is refused at the next
    boundary, as long as it is still alive: a search for a learning rate that has thrown its optimizer away leaves nothing
    that a resume would lack.

    Not seen: an update that is not made by an optimizer of torch, such as ``parameter.add_()`` in the loop; an optimizer
    that is made anew for each step; a step inside of a compiled function; a class that never calls ``Optimizer.__init__``.

    Args:
        attached: a method of the run that gives its attached objects by component: modules, optimizers, whatever is under
            ``extra``.
        names: a method of the run that gives ``id(parameter)`` -> its name, for each of its parameters.
    """

    def __init__(self, attached: Callable[[], Mapping[str, Any]], names: Callable[[], Mapping[int, str]]) -> None:
        # weak: the run holds this watch, and a run in a cycle would keep its loader's workers until the next collection
        self._attached: weakref.WeakMethod[Callable[[], Mapping[str, Any]]] = weakref.WeakMethod(attached)
        self._names: weakref.WeakMethod[Callable[[], Mapping[int, str]]] = weakref.WeakMethod(names)
        self._verdicts: weakref.WeakKeyDictionary[torch.optim.Optimizer, str | int] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        _ALL.add(self)

    def forget(self) -> None:
        """Look anew at every optimizer, because something more is attached."""
        self._verdicts.clear()
        for optimizer in [each for each in self._steps if self._verdict(each) is not _FOREIGN]:
            del self._steps[optimizer]

    def check(self, where: str) -> None:
        """Refuse the optimizers that have stepped parameters of the run and are not attached.

        Args:
            where: the call, for the message.

        Raises:
            UnattachedOptimizer: naming the class and the parameters of each.
        """
        if not self._steps:
            return
        found = [
            f"{steps} by a {kind_of(optimizer)} on {self._shown(optimizer)}" for optimizer, steps in self._steps.items()
        ]
        raise UnattachedOptimizer(
            where,
            expected="steps of attached optimizers only",
            found=f"steps of others on the parameters of this run: {'; '.join(found)}",
            fix="attach(model, optimizer), or live.register('second', optimizer) for one more; of a wrapper and the optimizer "
            "inside of it attach the wrapper; without its state a resume would begin it anew",
        )

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        verdict = self._verdicts.get(optimizer)
        if verdict is _FINE:
            return
        if verdict is None or (verdict is not _FOREIGN and verdict != len(optimizer.param_groups)):
            verdict = self._verdicts[optimizer] = self._verdict(optimizer)
        if verdict is _FOREIGN:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def _verdict(self, optimizer: torch.optim.Optimizer) -> str | int:
        """``_FINE``, ``_FOREIGN``, or the number of its groups if no parameter of the run is in them."""
        attached = (self._attached() or dict)()
        if any(optimizer is each for each in attached.values()):
            return _FINE
        if not self._mine(optimizer):
            return len(optimizer.param_groups)
        return _FINE if _holds(attached.values(), optimizer) else _FOREIGN

    def _mine(self, optimizer: torch.optim.Optimizer) -> list[str]:
        names = (self._names() or dict)()
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [names[id(parameter)] for parameter in parameters if id(parameter) in names]

    def _shown(self, optimizer: torch.optim.Optimizer) -> str:
        names = self._mine(optimizer)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more


def _holds(attached: Any, wanted: torch.optim.Optimizer) -> bool:
    """Whether an attached object that may save an optimizer holds this one; modules and schedulers save none."""
    closed = (torch.nn.Module, torch.optim.lr_scheduler.LRScheduler, torch.Tensor)
    queue = deque((each, 0) for each in attached if not isinstance(each, closed))
    seen = {id(each): each for each, _ in queue}
    while queue and len(seen) < _LOOKED_AT:
        value, depth = queue.popleft()
        if value is wanted:
            return True
        for _, child in held_by(value, names=True) if depth < _DEPTH else ():
            if id(child) not in seen and not isinstance(child, closed):
                seen[id(child)] = child
                queue.append((child, depth + 1))
    return False

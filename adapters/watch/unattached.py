"""`StepWatch`: detects optimizers that step the parameters of a run without being attached to it."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfold.adapters.components.component import kind_of
from trainfold.adapters.own_state.attributes import held_by
from trainfold.core.errors import UnattachedOptimizer
from trainfold.core.printable import with_article

_LOOKED_AT: Final = 20_000
_DEPTH: Final = 8
_SHOWN: Final = 8
_FINE: Final = "fine"
_FOREIGN: Final = "foreign"


@final
class _Watches:
    """All watches of the process. They share one hook in torch, which stays: removing it during a step would break that step."""

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
    """Looks at every optimizer of the process when it steps, through torch's global hook.

    An optimizer does not concern the run if it has none of the run's parameters. It is accepted if an attached object
    references it, such as the inner optimizer of a Lookahead, or one whose ``state_dict`` is under ``extra``. Any other is
    refused at the next boundary if it is still alive then. A learning-rate search that has dropped its optimizer leaves
    nothing that a resume would miss.

    Not seen: updates without a torch optimizer, such as ``parameter.add_()`` in the loop; an optimizer that is created for
    each step; a step inside a compiled function; a class that never calls ``Optimizer.__init__``.

    Args:
        attached: a method of the run that returns its attached objects by component: modules, optimizers, everything under
            ``extra``.
        names: a method of the run that returns ``id(parameter)`` -> its name, for each of its parameters.
    """

    def __init__(self, attached: Callable[[], Mapping[str, Any]], names: Callable[[], Mapping[int, str]]) -> None:
        # weak: the run references this watch, and a run in a cycle would keep its loader's workers until a collection
        self._attached: weakref.WeakMethod[Callable[[], Mapping[str, Any]]] = weakref.WeakMethod(attached)
        self._names: weakref.WeakMethod[Callable[[], Mapping[int, str]]] = weakref.WeakMethod(names)
        self._verdicts: weakref.WeakKeyDictionary[torch.optim.Optimizer, str | int] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        _ALL.add(self)

    def forget(self) -> None:
        """Check every optimizer again, because another object was attached."""
        self._verdicts.clear()
        for optimizer in [each for each in self._steps if self._verdict(each) is not _FOREIGN]:
            del self._steps[optimizer]

    def check(self, where: str) -> None:
        """Refuse to continue if an unattached optimizer has stepped parameters of the run.

        Args:
            where: the call, for the message.

        Raises:
            UnattachedOptimizer: if there is one; it names the class and the parameters of each.
        """
        if not self._steps:
            return
        found = [
            f"{steps} by {with_article(kind_of(optimizer))} on {self._shown(optimizer)}"
            for optimizer, steps in self._steps.items()
        ]
        raise UnattachedOptimizer(
            where,
            expected="steps of attached optimizers only",
            found=f"steps of others on the parameters of this run: {'; '.join(found)}",
            fix="attach(model, optimizer), or live.register('second', optimizer) for another one; if one optimizer wraps another, "
            "attach the wrapper; otherwise a resume would restart the optimizer without its state",
        )

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer."""
        verdict = self._verdicts.get(optimizer)
        if verdict is _FINE:
            return
        if verdict is None or (verdict is not _FOREIGN and verdict != len(optimizer.param_groups)):
            verdict = self._verdicts[optimizer] = self._verdict(optimizer)
        if verdict is _FOREIGN:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def _verdict(self, optimizer: torch.optim.Optimizer) -> str | int:
        """``_FINE``, ``_FOREIGN``, or its number of param groups if none of them has a parameter of the run."""
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
    """Whether an attached object that may save an optimizer references this one; modules and schedulers save none."""
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

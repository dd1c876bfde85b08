"""`UpdateHooks`: calls a method before each step of each attached optimizer."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import torch


@final
class UpdateHooks:
    """Calls a method before each optimizer step, until it is removed or its object is gone.

    Args:
        before_update: a bound method. It is kept weakly, so that an optimizer keeps no manager alive.
    """

    def __init__(self, before_update: Callable[[], None]) -> None:
        self._before_update = weakref.WeakMethod(before_update)
        self._handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        # a manager that is never closed leaves no hooks behind
        weakref.finalize(self, _remove, self._handles).atexit = False

    def install(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[str]:
        """Install the missing hooks.

        Args:
            optimizers: by name.

        Returns:
            The names of those that have a hook. One whose class never called ``Optimizer.__init__`` takes none.
        """
        return [name for name, optimizer in optimizers.items() if self._has_hook(optimizer)]

    def announce(self) -> None:
        """Call the method, if its object is still there: something else than an optimizer is about to write."""
        if (call := self._before_update()) is not None:
            call()

    def remove(self) -> None:
        """Remove all hooks."""
        _remove(self._handles)

    def _has_hook(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._handles:
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                return False
            found = self._before_update

            def before_step(*_: Any) -> None:
                if (call := found()) is not None:
                    call()

            # a compiled step calls it uncompiled: it waits for threads, and reads what is there at that moment
            hook = torch.compiler.disable(before_step)  # type: ignore[no-untyped-call]
            self._handles[optimizer] = optimizer.register_step_pre_hook(hook)
        return True


def _remove(handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()

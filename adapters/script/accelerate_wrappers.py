"""Optimizers and schedulers that accelerate has wrapped: their state is in the inner object, and the wrapper knows whether a window is open."""

from collections.abc import Collection
from typing import Any, final

import attrs

from trainfold.core import tree
from trainfold.core.errors import IncompleteWindow, InvalidArgument

_INNER = {"accelerate.optimizer": "optimizer", "accelerate.scheduler": "scheduler"}


def unwrapped(value: Any) -> Any:
    """Return what a wrapper of ``accelerator.prepare`` wraps, and anything else as it is.

    Examples:
        >>> unwrapped(3)
        3
    """
    name = _INNER.get(type(value).__module__)
    return value if name is None else getattr(value, name)


@final
@attrs.frozen
class AccelerateWrappers:
    """The wrapped optimizers among those of a run.

    Attributes:
        optimizers: as ``accelerator.prepare`` returned them.
    """

    optimizers: list[Any]

    @classmethod
    def among(cls, given: Collection[Any], extra: Collection[Any]) -> "AccelerateWrappers":
        """Those among the objects of a run.

        Args:
            given: the optimizer, and the objects under ``extra``.
            extra: the latter alone.

        Raises:
            InvalidArgument: for an optimizer whose gradient scaler is not attached, because a resume would begin with another scale.
        """
        found = [each for each in given if type(each).__module__ == "accelerate.optimizer"]
        for each in found:
            if each.scaler is not None and all(one is not each.scaler for one in extra):
                raise InvalidArgument("attach.extra", expected="the gradient scaler of the optimizer, because it scales each step",
                                      found="none", fix='pass extra={"scaler": accelerator.scaler}')  # fmt: skip
        return cls(found)

    def and_among(self, given: Any, extra: Collection[Any]) -> "AccelerateWrappers":
        """These, and an object that is attached later, if it is one.

        Args:
            given: the object.
            extra: what is attached already.

        Raises:
            InvalidArgument: as from `among`.
        """
        return AccelerateWrappers([*self.optimizers, *self.among([given], extra).optimizers])

    @property
    def is_accumulating(self) -> bool:
        """Whether a window of ``accelerator.accumulate`` is open."""
        return not all(each.gradient_state.sync_gradients for each in self.optimizers)

    def steps(self, given: int | None) -> int | None:
        """How many steps a call of `advance` counts: 0 inside a window of ``accelerator.accumulate``, in which no optimizer steps.

        Args:
            given: what was passed; None if nothing was.

        Raises:
            IncompleteWindow: for a step inside it.
        """
        if not self.is_accumulating:
            return given
        if given:
            raise IncompleteWindow("live.advance", expected="no step inside a window of accelerator.accumulate", found=f"steps={given}",
                                   fix="call live.advance(), which counts a step when accelerator.sync_gradients is True")  # fmt: skip
        return 0


def unwrapped_schedulers(scheduler: Any) -> Any:
    """The schedulers of a run, without wrappers.

    Examples:
        >>> unwrapped_schedulers({"model": 1}), unwrapped_schedulers(None)
        ({'model': 1}, None)
    """
    return None if scheduler is None else tree.map(unwrapped, scheduler)

"""Backwards that an error has interrupted: whether one has left gradients, and what torch's wrappers must forget before the next one."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel

from trainfold.adapters.sharded.dtensor import local_part
from trainfold.adapters.sharded.fsdp2_groups import (
    drop_held_back,
    fsdp2_modules,
    is_interrupted,
    kept_back,
    param_groups,
    roots,
)
from trainfold.core.errors import InvalidState


@final
class GradientMarks:
    """Which gradients there are, and how often each was written to; it keeps none of them alive.

    Args:
        parameters: that are trained.
        sharded: modules as `fsdp2_modules` returns them.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> marks = GradientMarks([weight], [])
        >>> marks.have_moved()
        False
        >>> weight.sum().backward()
        >>> marks.have_moved()
        True
    """

    def __init__(self, parameters: list[torch.nn.Parameter], sharded: list[Any]) -> None:
        self._parameters, self._sharded = parameters, sharded
        self._marks = self._now()

    def have_moved(self) -> bool:
        """Whether a backward has begun since, as far as it has written a gradient, or FSDP2 has not finished it."""
        return is_interrupted(self._sharded) or any(
            now is not None and now != before for now, before in zip(self._now(), self._marks, strict=True)
        )

    def _now(self) -> list[tuple[int, int] | None]:
        gradients = [each.grad for each in self._parameters]
        if self._sharded:  # a DTensor is written to by its part
            gradients += kept_back(param_groups(self._sharded))
            gradients = [None if each is None else local_part(each) for each in gradients]
        return [None if each is None else (id(each), each._version) for each in gradients]  # noqa: SLF001


def forget_interrupted(modules: Iterable[torch.nn.Module]) -> None:
    """Make wrapped and sharded modules ready for the next forward, whatever became of the last backward; gradients that only FSDP2 holds are dropped.

    Every rank calls it.

    Raises:
        InvalidState: if FSDP2 has not finished a backward, and this version of torch has no way to forget it.
    """
    modules = list(modules)
    sharded = fsdp2_modules(modules)
    for each in roots(sharded):
        if hasattr(each, "reset_iter_state"):
            each.reset_iter_state()
        elif is_interrupted([each]):
            raise InvalidState(
                "live.drop_window",
                expected="modules of FSDP2 that have finished their backward, or torch 2.13, which can forget one",
                found=f"a backward that an error has interrupted, and torch {torch.__version__}",
                fix="end this process and start again: the run resumes from its checkpoint",
            )
    drop_held_back(param_groups(sharded))
    for wrapper in [each for module in modules for each in module.modules()]:
        if isinstance(wrapper, DistributedDataParallel) and not _has_finished(wrapper):
            torch.distributed.barrier(wrapper.process_group)  # sums that are under way write to the memory of the next
            wrapper.reducer._reset_state()  # noqa: SLF001


def _has_finished(wrapper: DistributedDataParallel) -> bool:
    """Whether the last backward with a sum of gradients has ended."""
    try:
        wrapper.reducer._check_reducer_finalized()  # noqa: SLF001
    except RuntimeError:
        return False
    return True

"""Scenes with large data files, around the sizes at which a store may change its way to write, with one writer and with several."""

import fcntl
import os
from collections.abc import Callable
from typing import Any, Final, final
from unittest import mock

import attrs
import torch

from crash.disk.effects import Effect, Recorder
from crash.disk.syscalls import Handler
from crash.saves.scenarios import Scene, record, state_at, two_ranks
from trainfold.backends.stores import direct_io
from trainfold.core.state.state import TrainState

MIB: Final = 1 << 20
O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


@final
@attrs.frozen
class LargeScene:
    """Saves whose largest files have the same size.

    Attributes:
        size_mib: the minimum size of these files.
        is_direct: whether writes bypass the page cache.
        writers: how many ranks save, each with such a file.
        saves: how many saves there are, each of another step.
    """

    size_mib: int
    is_direct: bool
    writers: int = 1
    saves: int = 2

    def __str__(self) -> str:
        how = "direct" if self.is_direct else "buffered"
        return f"above {self.size_mib} MiB, {how}, {self.writers} writer{'s' * (self.writers > 1)}"

    def make(self, step: int, variant: int = 0) -> TrainState:
        """A state with a large tensor for each writer; its size is not a multiple of the write size."""
        state = state_at(step, variant)
        count = (self.size_mib * MIB + 70_000) // 8
        first = 1_000_003 * (10 * step + variant)
        large = [torch.arange(first + i, first + i + count) for i in range(self.writers)]
        return state.evolve(extra={**state.extra, "large": large})

    def record(self, mutant: Callable[[Recorder], Handler] | None = None) -> list[Effect]:
        """The effects; see `crash.scenarios.record`."""
        scenario = self._saves_of_ranks if self.writers > 1 else self._saves
        with mock.patch.object(direct_io, "try_direct", self._try_direct):
            return record(scenario, make=self.make, mutant=mutant)

    def _saves(self, scene: Scene) -> None:
        for step in range(1, self.saves + 1):
            scene.save(step)

    def _saves_of_ranks(self, scene: Scene) -> None:
        two_ranks(scene, steps=range(1, self.saves + 1))

    def _try_direct(self, fd: int) -> bool:
        if not self.is_direct:
            return False
        if O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | O_DIRECT)
        return True  # the calls are the same on a filesystem without it


LARGE: Final = (
    LargeScene(1, is_direct=False),
    LargeScene(8, is_direct=True),
    LargeScene(32, is_direct=True, saves=1),
    LargeScene(8, is_direct=True, writers=2, saves=1),
)
MORE: Final = (  # for the soak; the teeth run in both modes above each size
    LargeScene(1, is_direct=True),
    LargeScene(8, is_direct=False),
    LargeScene(32, is_direct=False, saves=1),
    LargeScene(32, is_direct=True, writers=2, saves=1),
    LargeScene(1, is_direct=False, writers=2),
)


def call(change: Callable[..., bool], instead: Callable[..., Any] | None = None) -> Callable[[Recorder], Handler]:
    """A mutant: the calls that a function selects are skipped or replaced, without an error."""

    def mutant(recorder: Recorder) -> Handler:
        def handle(name: str, real: Any, args: Any, kwargs: Any) -> Any:
            if not change(recorder, name, args):
                return recorder(name, real, args, kwargs)
            return None if instead is None else instead(recorder, real, args, kwargs)

        return handle

    return mutant

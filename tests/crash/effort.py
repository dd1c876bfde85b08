"""How much is tested: a sample in the usual run, and all that is affordable in `make soak`."""

import os
import sys
from collections.abc import Sequence
from typing import Final

from crash.disk.effects import Effect
from crash.disk.states import Budget, before_syncs

IS_SOAK: Final = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
BUDGET: Final = Budget(names=200_000, contents=4096) if IS_SOAK else Budget(names=16, contents=4)
GO_ON_SHARE: Final = 0.1 if IS_SOAK else 0.03
CRASH_AGAIN_EVERY: Final = 10 if IS_SOAK else 120  # one in so many of the new states
CUTS: Final = 200 if IS_SOAK else 6


def places(effects: Sequence[Effect]) -> list[int] | None:
    """The places where the states of a crash are looked at: all in the soak, which draws other states at each of them."""
    return None if IS_SOAK else before_syncs(effects)


def say(text: str) -> None:
    """Print a figure, which `pytest -rP` shows."""
    sys.stdout.write(f"\n{text}\n")

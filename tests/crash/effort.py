"""How much is tested: a sample in the usual run, and all that is affordable in `make soak`."""

import os
import sys
from typing import Final

from crash.disk.states import Budget

IS_SOAK: Final = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
BUDGET: Final = Budget(names=200_000, contents=4096) if IS_SOAK else Budget(names=16, contents=4)
GO_ON_SHARE: Final = 0.1 if IS_SOAK else 0.05
CRASH_AGAIN_EVERY: Final = 10 if IS_SOAK else 120  # one in so many of the new states
CUTS: Final = 200 if IS_SOAK else 10


def say(text: str) -> None:
    """Print a figure, which `pytest -rP` shows."""
    sys.stdout.write(f"\n{text}\n")

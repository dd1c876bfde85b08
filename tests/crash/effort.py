"""How much to look at: a sample in the usual run of the tests, and all that is affordable in `make soak`."""

import os
import sys
from typing import Final

from crash.disk.states import Budget

IS_SOAK: Final = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
BUDGET: Final = Budget(names=200_000, contents=4096) if IS_SOAK else Budget(names=16, contents=4)
GO_ON_SHARE: Final = 0.1 if IS_SOAK else 0.05
CRASH_AGAIN_EVERY: Final = 10 if IS_SOAK else 120  # each how manieth state that is new
CUTS: Final = 200 if IS_SOAK else 10


def say(text: str) -> None:
    """Tell a figure: seen with `pytest -rP`."""
    sys.stdout.write(f"\n{text}\n")

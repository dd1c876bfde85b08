"""How a replay ends a program that it runs, such as after its last step."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Final

from trainfold.backends.flight.record_file import RecordFile
from trainfold.core.rehearsal.orders import RECORD_NAME, Orders

NONFINITE_NAME: Final = "nonfinite.json"
SUSPECTED_NAME: Final = "suspected-{}.json"  # of a rank, or of all as a pattern


def end_after_last(orders: Orders | None, step: int) -> None:
    """End this program, which no manager ends, if a replay wants none of its steps from this one on.

    Args:
        orders: of the replay; None without one.
        step: that was done.
    """
    if orders is not None and orders.replay is not None and step > orders.steps:
        end_replay(orders, orders.steps, "it went on past its end")


def end_replay(orders: Orders, step: int, why: str) -> None:
    """End this process at once, as the replay asks.

    Args:
        orders: of the replay.
        step: the last one.
        why: in words.
    """
    record = RecordFile(Path(orders.notes, RECORD_NAME), clock=time.monotonic)
    record.write("done", step, why=why)  # the replay then ends the other ranks, which wait for this one
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what it said is in the file of the replay
            stream.flush()
    os._exit(0)

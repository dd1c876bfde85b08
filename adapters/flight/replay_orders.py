"""What a replay changes in a program that it runs: it ends at a NaN."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from trainfold.adapters.flight.nonfinite import NonFiniteOutput, NonFiniteWatch
from trainfold.backends.stores.record_file import RecordFile
from trainfold.core.rehearsal.orders import RECORD_NAME, Orders

NONFINITE_NAME: Final = "nonfinite.json"


def end_at_nonfinite(orders: Orders | None, rank: int, step: Callable[[], int | None]) -> bool:
    """End this program at the first output of a module that is not finite, if the replay asks for that; returns whether it does.

    Args:
        orders: of the replay; None without one.
        rank: of this process.
        step: returns the step under way; None if it is not known.
    """
    if orders is None or orders.replay is None or not orders.replay.until_nonfinite:
        return False
    NonFiniteWatch(lambda found: end_with(orders, rank, step(), found)).install()
    return True


def end_with(orders: Orders, rank: int, step: int | None, found: NonFiniteOutput | str) -> None:
    """Write down what was found, and end this process at once: what it would train from here on is worthless.

    Args:
        orders: of the replay.
        rank: of this process.
        step: the step under way.
        found: the output; or, where no output shows it, what is not finite, in words.
    """
    seen = attrs.asdict(found) if isinstance(found, NonFiniteOutput) else None
    notes = Path(orders.notes)
    being_written = notes / f".{NONFINITE_NAME}.{os.getpid()}"
    about = {"step": step, "rank": rank, "text": str(found), "output": seen}
    being_written.write_text(json.dumps(about), encoding="utf-8")
    being_written.replace(notes / NONFINITE_NAME)
    record = RecordFile(notes / RECORD_NAME, clock=time.monotonic)
    record.write("done", step or 0, why="not finite")  # the replay then ends the other ranks, which wait for this one
    os._exit(0)

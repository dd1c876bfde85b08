"""What a replay changes in a program that it runs: it ends at a NaN, and after its last step."""

import contextlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs

from trainfold.adapters.flight.nonfinite import NonFiniteOutput, NonFiniteWatch, uncompiled
from trainfold.backends.flight.record_file import RecordFile
from trainfold.core.flight.step_record import LogLine, StepRecord, float_of_bits
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
    uncompiled()
    warnings.filterwarnings(
        "ignore", "Using `torch.compile", UserWarning
    )  # that hooks see the wrapper of a compiled module too: they may
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
    _end(orders, step or 0, "not finite")


def end_at_bad_record(orders: Orders, rank: int, lines: Sequence[LogLine]) -> None:
    """End this program if a loss or a norm that was recorded is not finite.

    Args:
        orders: of a replay that ends at what is not finite.
        rank: of this process.
        lines: of one step.
    """
    for line in lines:
        for name in ("loss", "norm"):
            bits = getattr(line, name) if isinstance(line, StepRecord) else None
            if bits is not None and not math.isfinite(float_of_bits(bits)):
                end_with(orders, rank, line.step, f"the {name} is not finite, and the output of every module is")


def end_after_last(orders: Orders | None, step: int) -> None:
    """End this program, which no manager ends, if a replay wants none of its steps from this one on.

    Args:
        orders: of the replay; None without one.
        step: that was done.
    """
    if orders is not None and orders.replay is not None and step > orders.steps:
        _end(orders, orders.steps, "it went on past its end")


def _end(orders: Orders, step: int, why: str) -> None:
    record = RecordFile(Path(orders.notes, RECORD_NAME), clock=time.monotonic)
    record.write("done", step, why=why)  # the replay then ends the other ranks, which wait for this one
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what it said is in the file of the replay
            stream.flush()
    os._exit(0)

"""`NonFiniteEnd`: ends a program in a replay at the first step that a NaN or an infinity has reached, and writes down which module made it."""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final, final

import attrs
import torch

from trainfold.adapters.flight.nonfinite import NonFiniteOutput, NonFiniteWatch, uncompiled
from trainfold.adapters.flight.replay_orders import NONFINITE_NAME, end_replay
from trainfold.core.flight.step_record import LogLine, StepRecord, is_finite
from trainfold.core.rehearsal.orders import Orders

_ALONE: Final = "is not finite, and the output of every module is"
_SHOWN: Final = 12
_WAITED_SECS: Final = 1.0  # for a rank that has the module, where this one has a mean over the ranks alone


def nonfinite_end(orders: Orders | None, rank: int, step: Callable[[], int | None]) -> "NonFiniteEnd | None":
    """Watch every module from here on, if the replay asks for that; None without.

    Args:
        orders: of the replay; None without one.
        rank: of this process.
        step: returns the step under way; None if it is not known.
    """
    if orders is None or orders.replay is None or not orders.replay.until_nonfinite:
        return None
    uncompiled()
    warnings.filterwarnings(
        "ignore", "Using `torch.compile", UserWarning
    )  # that hooks see the wrapper of a compiled module too: they may
    return NonFiniteEnd(orders, rank, step)


@final
class NonFiniteEnd:
    """Judges each step. What is not finite counts if it reached the recorded loss or a trainable parameter, or if the program ended in that step.

    So a mask of infinities, or the scores of a router, are not at fault, nor is a step whose gradients are not finite and which a scaler of gradients leaves out.

    Args:
        orders: of the replay.
        rank: of this process.
        step: returns the step under way; None if it is not known.
    """

    def __init__(self, orders: Orders, rank: int, step: Callable[[], int | None]) -> None:
        self._orders, self._rank, self._step = orders, rank, step
        self._watch = NonFiniteWatch()
        self._watch.install()
        self._parameters: dict[
            str, int
        ] = {}  # those that are not finite -> the step after which they were, where all outputs were finite
        self._buffers: dict[str, int] = {}
        Finalize(None, self._at_exit, exitpriority=0)  # also in a process of multiprocessing, where atexit is not asked

    def stepped(self, step: int, loss: bytes | None = None, norm: bytes | None = None) -> None:
        """Judge a step of a live run.

        Args:
            step: that was done.
            loss: bits of what was recorded; None for nothing.
            norm: of the gradients; one that is not finite counts only if the optimizer took the step.
        """
        bad = _not_finite(loss, norm)
        broken = self._watch.broken()
        if loss is not None and "loss" not in bad and not self._watch.has_nan:
            self._watch.harmless()  # infinities that did not reach the loss: then a gradient or the optimizer broke the parameters
        is_made = self._watch.found is not None or (loss is None and self._watch.has_known_nan)
        if "loss" in bad or (broken and (bad or is_made)):
            self._end(step, f"{f'the recorded {bad[0]}' if bad else 'a parameter'} {_ALONE}")
        self._watch.harmless()
        self._parameters = {leaf.path: self._parameters.get(leaf.path, step) for leaf in broken}
        self._buffers = {leaf.path: self._buffers.get(leaf.path, step) for leaf in self._watch.broken_buffers()}
        if step >= self._orders.steps:
            self._end_broken()

    def recorded(self, lines: Sequence[LogLine]) -> None:
        """Judge a pure step, which takes no step that it leaves out, by its records."""
        for line in lines:
            if isinstance(line, StepRecord):
                if bad := _not_finite(line.loss, line.norm):
                    self._end(line.step, f"the recorded {bad[0]} {_ALONE}")
                self._watch.harmless()

    def begin(self, objects: Mapping[str, object]) -> None:
        """Look at what a loop of these does, and name its modules as checkpoints do.

        Args:
            objects: component -> what is attached.
        """
        self._watch.attach(objects)
        self._watch.is_looking = True

    def closed(self) -> None:
        """Note that no step follows: what the program does from here on, as an evaluation, is of none. The step under way still counts, in which it may have given up."""
        self._watch.is_looking = False

    def over(self) -> None:
        """Note that the loop is over: what comes is not of its steps."""
        self._watch.harmless()

    def _at_exit(self) -> None:
        """Judge the step that the program did not end, as one that raises if its loss is not finite. It may also end so in the middle of an evaluation."""
        error, step = sys.exc_info()[1] or getattr(sys, "last_value", None), self._step()
        if step is not None and step > self._orders.steps:
            return
        if self._watch.found is not None and (error is not None or self._watch.is_trained):
            is_told = isinstance(error, Exception)
            where = "this step" if step is None else f"step {step}"
            self._end(step, "", f"the program ended in {where} with {type(error).__name__}: {error}" if is_told else "")
        self._end_broken()

    def _end_broken(self) -> None:
        """End with what no output has shown, and none will: no step follows."""
        if self._parameters and self._watch.broken():
            self._end(min(self._parameters.values()), f"a parameter {_ALONE}")
        if self._buffers and self._watch.broken_buffers():
            self._end(min(self._buffers.values()), "a buffer is not finite, and each loss and trainable parameter is; an evaluation may show it")  # fmt: skip

    def _end(self, step: int | None, what: str, why: str = "") -> None:
        """Write down what was found, and end this process at once: what it would train from here on is worthless."""
        found, notes = self._watch.found, Path(self._orders.notes)
        known = "; ".join(self._watch.known[:_SHOWN])
        but = f", but for those that gave the same in steps that went well: {known}" if known else ""
        lines = [f"{what}{but}" if found is None else str(found)]
        for broke, text, leaves in (
            (
                self._parameters,
                "parameters became so in step {}, by their gradients or the optimizer",
                self._watch.broken,
            ),
            (self._buffers, "buffers became so in step {}", self._watch.broken_buffers),
        ):
            since = min(broke.values(), default=step)
            broken = [leaf for leaf in leaves() if broke.get(leaf.path) == since] if broke else []
            if broken:
                shown = "" if step in (since, None) else f"; step {step} shows it"
                lines += [text.format(since) + shown, *(f"  {leaf}" for leaf in broken[:_SHOWN])]
        if self._parameters and (found is None or self._watch.is_broken):
            step = min(self._parameters.values())
        if found is None and torch.distributed.is_initialized():
            time.sleep(_WAITED_SECS)
        if found is not None or not (notes / NONFINITE_NAME).exists():
            seen = attrs.asdict(found) if isinstance(found, NonFiniteOutput) else None
            text = "\n".join(filter(None, [*lines, why, *self._watch.missed]))
            about = {"step": step, "rank": self._rank, "text": text, "output": seen}
            being_written = notes / f".{NONFINITE_NAME}.{os.getpid()}"
            being_written.write_text(json.dumps(about), encoding="utf-8")
            being_written.replace(notes / NONFINITE_NAME)
        end_replay(self._orders, step or 0, "not finite")


def _not_finite(loss: bytes | None, norm: bytes | None) -> list[str]:
    """Which recorded numbers are not finite, by the names under which they are recorded."""
    return [name for name, bits in (("loss", loss), ("grad_norm", norm)) if not is_finite(bits)]

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

from trainfold.adapters.flight.leaf_text import LeafText
from trainfold.adapters.flight.nonfinite import NonFiniteOutput, NonFiniteWatch, uncompiled
from trainfold.adapters.flight.replay_orders import NONFINITE_NAME, SUSPECTED_NAME, end_replay
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

    In the first step nothing shows yet which infinities are by design, so they alone do not explain there why a program failed.

    A program that ends by `os._exit` or a signal is not asked at its end. So what counts if it ends now stands in a file, until its step went well.

    Args:
        orders: of the replay.
        rank: of this process.
        step: returns the step under way; None if it is not known.
    """

    def __init__(self, orders: Orders, rank: int, step: Callable[[], int | None]) -> None:
        self._orders, self._rank, self._step = orders, rank, step
        self._watch = NonFiniteWatch()
        self._watch.install()
        self._watch.on_kept = self._suspect
        self._pid = os.getpid()
        self._suspected: tuple[NonFiniteOutput | None, bool, int | None, int | None] = None, False, None, None
        self._parameters = _BrokenSince(self._watch.broken, "parameters", ", by their gradients or the optimizer")
        self._buffers = _BrokenSince(self._watch.broken_buffers, "buffers")
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
        self._parameters.take(step, broken)
        self._buffers.take(step, self._watch.broken_buffers())
        if step >= self._orders.steps:
            self._end_broken()
        self._suspect()

    def recorded(self, lines: Sequence[LogLine]) -> None:
        """Judge a pure step, which takes no step that it leaves out, by its records."""
        for line in lines:
            if isinstance(line, StepRecord):
                if bad := _not_finite(line.loss, line.norm):
                    self._end(line.step, f"the recorded {bad[0]} {_ALONE}")
                self._watch.harmless()
        self._suspect()

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
        self._suspect()

    def _at_exit(self) -> None:
        """Judge the step that the program did not end, as one that raises if its loss is not finite. It may also end so in the middle of an evaluation."""
        error, step = sys.exc_info()[1] or getattr(sys, "last_value", None), self._step()
        if self._is_past(step) or (error is not None and self._is_doubtful()):
            return
        if self._watch.found is not None and (error is not None or self._watch.is_trained):
            self._end(step, "", _ended_text(step, error))
        self._end_broken()

    def _is_past(self, step: int | None) -> bool:
        return step is not None and step > self._orders.steps

    def _is_doubtful(self) -> bool:
        """Whether what is found may be by design, as far as anything shows, where the program fails."""
        watch = self._watch
        return watch.is_first_step and watch.found is not None and not watch.has_nan and not watch.broken()

    def _suspect(self) -> None:
        """Write down what `_at_exit` would find, for an end at which it is not called, or take it back. A process that this one has forked, as for a loader, trains nothing."""
        output = self._watch.found if self._watch.is_trained else None
        if os.getpid() != self._pid:
            return
        suspected = output, self._is_doubtful(), self._parameters.first, self._buffers.first
        if suspected == self._suspected:
            return
        self._suspected, step = suspected, self._step()
        place, broken = Path(self._orders.notes, SUSPECTED_NAME.format(self._rank)), self._broken()
        if self._is_past(step) or (output is None and broken is None):
            place.unlink(missing_ok=True)
        elif output is not None:
            self._write(place, step, "")
        elif broken is not None:
            self._write(place, *broken)

    def _end_broken(self) -> None:
        """End with what no output has shown, and none will: no step follows."""
        if (broken := self._broken()) is not None:
            self._end(*broken)

    def _broken(self) -> tuple[int, str] | None:
        """The step that broke a leaf, where no output has shown it, with a text; None if none did."""
        for broken, what in (
            (self._parameters, f"a parameter {_ALONE}"),
            (self._buffers, "a buffer is not finite, and each loss and trainable parameter is; an evaluation may show it"),
        ):  # fmt: skip
            if broken.first is not None and broken.look():
                return broken.first, what
        return None

    def _end(self, step: int | None, what: str, why: str = "") -> None:
        """Write down what was found, and end this process at once: what it would train from here on is worthless."""
        found, place = self._watch.found, Path(self._orders.notes, NONFINITE_NAME)
        if found is None and torch.distributed.is_initialized():
            time.sleep(_WAITED_SECS)
        if found is not None or not place.exists():
            self._write(place, step, what, why)
        end_replay(self._orders, step or 0, "not finite")

    def _write(self, place: Path, step: int | None, what: str, why: str = "") -> None:
        """Write down what was found in a step, or in the one before that broke parameters."""
        found, text = self._watch.found, self._text(step, what, why)
        if (found is None or self._watch.is_broken) and self._parameters.first is not None:
            step = self._parameters.first
        output = None if found is None else attrs.asdict(found)
        about = {"step": step, "rank": self._rank, "text": text, "output": output, "is_doubtful": self._is_doubtful()}
        being_written = place.with_name(f".{place.name}.{os.getpid()}")
        being_written.write_text(json.dumps(about), encoding="utf-8")
        being_written.replace(place)

    def _text(self, step: int | None, what: str, why: str) -> str:
        """What was found, in lines."""
        found, known = self._watch.found, "; ".join(self._watch.known[:_SHOWN])
        but = f", but for those that gave the same in steps that went well: {known}" if known else ""
        lines = [f"{what}{but}" if found is None else str(found)]
        lines += [*self._parameters.lines(step), *self._buffers.lines(step), why, *self._watch.missed]
        return "\n".join(filter(None, lines))


@final
class _BrokenSince:
    """The leaves that are not finite, each with the step after which it was, where all outputs were finite.

    Args:
        look: returns those that are not finite now.
        noun: what they are.
        by: what made them so, in words.
    """

    def __init__(self, look: Callable[[], list[LeafText]], noun: str, by: str = "") -> None:
        self.look, self._noun, self._by = look, noun, by
        self._since: dict[str, int] = {}

    @property
    def first(self) -> int | None:
        """The first of these steps; None without any."""
        return min(self._since.values(), default=None)

    def take(self, step: int, leaves: Sequence[LeafText]) -> None:
        """Note which are not finite after a step."""
        self._since = {leaf.path: self._since.get(leaf.path, step) for leaf in leaves}

    def lines(self, step: int | None) -> list[str]:
        """Those of the first step, in words, and which step shows them."""
        first = self.first
        broken = [] if first is None else [leaf for leaf in self.look() if self._since.get(leaf.path) == first]
        if not broken:
            return []
        shown = "" if step in (first, None) else f"; step {step} shows it"
        return [f"{self._noun} became so in step {first}{self._by}{shown}", *(f"  {leaf}" for leaf in broken[:_SHOWN])]


def _ended_text(step: int | None, error: BaseException | None) -> str:
    """With what the program ended; empty without an error."""
    where = "this step" if step is None else f"step {step}"
    return f"the program ended in {where} with {type(error).__name__}: {error}" if isinstance(error, Exception) else ""


def _not_finite(loss: bytes | None, norm: bytes | None) -> list[str]:
    """Which recorded numbers are not finite, by the names under which they are recorded."""
    return [name for name, bits in (("loss", loss), ("grad_norm", norm)) if not is_finite(bits)]

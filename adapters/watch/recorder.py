"""`Recorder`: listens to a live run, in a rehearsal or for a flight log; also checks the values that a program records."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article
from trainfold.core.state.state import Progress

MOST_NAME: Final = 1000  # characters, of up to 12 bytes in a journal, whose lines have 65,536


class Recorder(Protocol):
    """Listens to a live run. A manager that was made in a rehearsal, or that records, gives one to each live run that it sees."""

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values of the current step."""

    def consumed(self, batches: Sequence[str]) -> None:
        """Note the digests of the batches that were counted last, of every loader."""

    def advanced(self, progress: Progress) -> None:
        """Note that an optimizer step was counted; the next one is in the epoch of these counters."""

    def is_over(self, step: int) -> bool:
        """Whether the run ends at this step."""


def with_recorder(recorders: Sequence[Recorder], new: Recorder) -> tuple[Recorder, ...]:
    """The recorders of a run with a new one, which takes the place of another of its class."""
    return (*(each for each in recorders if type(each) is not type(new)), new)


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that are not numbers, or that a log cannot hold. Tensors are not read, so nothing waits for a GPU.

    Raises:
        InvalidArgument: naming the value.
    """
    for name, value in values.items():
        if len(name) > MOST_NAME:
            raise InvalidArgument("live.record", expected=f"names of at most {MOST_NAME} characters", found=f"one of {len(name)}, {name[:20]!r}...",
                                  fix="shorten it: a line of the journal has room for no more")  # fmt: skip
        if isinstance(value, float):
            continue
        if isinstance(value, numbers.Real):
            try:
                float(value)
            except OverflowError:
                raise InvalidArgument(f"live.record({name}=)", expected="a number that a float can hold", found=f"{with_article(type(value).__qualname__)} beyond 1.8e308",
                                      fix="record its logarithm, or float('inf')") from None  # fmt: skip
            continue
        shape = getattr(value, "shape", None)
        if isinstance(value, numbers.Number) or (shape is not None and len(shape) == 0 and hasattr(value, "item")):
            continue
        shape = None if shape is None else tuple(shape)
        raise InvalidArgument(
            f"live.record({name}=)",
            expected="a number, or a tensor without dimensions",
            found=f"{with_article(type(value).__qualname__)}" + ("" if shape is None else f" of shape {shape}"),
            fix="record one number, such as loss.mean(); give each of several numbers a name",
        )


def plain_number(value: Any) -> complex:
    """A number, or the number in a tensor, as a Python number; reading a GPU's tensor waits for the GPU.

    Examples:
        >>> plain_number(torch.tensor(2.5)), plain_number(3)
        (2.5, 3)
    """
    if isinstance(value, bool | int | float | complex):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach()
    found = value.item() if hasattr(value, "item") else float(value)
    return found if isinstance(found, bool | int | float | complex) else float(found)

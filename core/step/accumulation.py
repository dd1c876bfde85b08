"""Windows: the microbatches between two boundaries, and the arithmetic of accumulation.

A state exists only at a boundary. A step takes a whole window, so nothing can be saved in the middle of one.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias, TypeVar, get_args

from trainfold.core.checks import choice, count
from trainfold.core.errors import BatchNotDivisible, IncompleteWindow, InvalidArgument

T = TypeVar("T")
Tail: TypeAlias = Literal["raise", "drop", "step"]


def windows(microbatches: Iterable[T], accumulate: int, *, tail: Tail = "raise") -> Iterator[list[T]]:
    """Group a stream of microbatches into the windows of optimizer steps.

    It reads exactly ``accumulate`` microbatches for each window that it yields, and never reads ahead.

    Args:
        microbatches: a stream; it may span epochs.
        accumulate: microbatches per window, >= 1.
        tail: what to do when the stream ends inside a window: ``"raise"``, ``"drop"`` the incomplete window, or
            ``"step"`` on it (its loss is divided by its own weight).

    Returns:
        Windows, each a list to pass to a step.

    Raises:
        IncompleteWindow: if the stream ends inside a window and ``tail="raise"``.
        InvalidArgument: at the call, before anything is read, for an unknown tail or ``accumulate < 1``.

    Examples:
        >>> list(windows(range(5), 2, tail="step"))
        [[0, 1], [2, 3], [4]]
        >>> list(windows(range(5), 2, tail="drop"))
        [[0, 1], [2, 3]]
    """
    _check_accumulate(accumulate)
    _check_tail(tail)
    return _windows(iter(microbatches), accumulate, tail)


def _windows(stream: Iterator[T], accumulate: int, tail: Tail) -> Iterator[list[T]]:
    window: list[T] = []
    for microbatch in stream:  # a for loop: a StopIteration from next() would become a RuntimeError here (PEP 479)
        window.append(microbatch)
        if len(window) == accumulate:
            yield window
            window = []
    if not window or tail == "drop":
        return
    if tail == "raise":
        raise IncompleteWindow(
            "the stream of microbatches",
            expected=f"{accumulate} microbatches a window",
            found=f"an end after {len(window)} of them",
            fix='choose tail="drop" or tail="step", or give the stream a whole number of windows',
        )
    yield window


def accumulation_steps(*, per_step: int, per_microbatch: int, world_size: int = 1) -> int:
    """Return the number of microbatches that each rank accumulates for a global batch.

    Args:
        per_step: samples (or tokens) per optimizer step, over all ranks.
        per_microbatch: samples (or tokens) per microbatch on one rank.
        world_size: number of data-parallel ranks.

    Raises:
        BatchNotDivisible: with the numbers, unless the division is exact.
        InvalidArgument: if one of the numbers is not positive.

    Examples:
        >>> accumulation_steps(per_step=512, per_microbatch=16, world_size=8)
        4
    """
    for name, value in (("per_step", per_step), ("per_microbatch", per_microbatch), ("world_size", world_size)):
        if value < 1:
            raise InvalidArgument(name, expected=">= 1", found=value, fix="count samples or tokens in whole units")
    steps, rest = divmod(per_step, per_microbatch * world_size)
    if rest:
        raise BatchNotDivisible(
            "per_step",
            expected=f"a multiple of per_microbatch x world_size = {per_microbatch} x {world_size} = "
            f"{per_microbatch * world_size}",
            found=f"{per_step} (remainder {rest})",
            fix=f"take {per_step - rest or per_microbatch * world_size} or {per_step - rest + per_microbatch * world_size}",
        )
    return steps


def check_plan(
    *, microbatches: int | None, accumulate: int, epochs: int = 1, max_steps: int | None = None, tail: Tail = "raise"
) -> int | None:
    """Refuse an impossible accumulation plan before a model exists.

    A window may span epochs. A run that stops at ``max_steps`` never reaches the incomplete window.

    Args:
        microbatches: microbatches per epoch; None for a stream of unknown length.
        accumulate: microbatches per window.
        epochs: epochs of the run.
        max_steps: the last step of the run; None for no limit.
        tail: as for `windows`.

    Returns:
        The number of optimizer steps of the run; None if neither the data nor ``max_steps`` determines it.

    Raises:
        BatchNotDivisible: if the data end inside a window, ``tail="raise"``, and ``max_steps`` is not reached before.
        InvalidArgument: if the run would have no step, or a number is out of range.

    Examples:
        >>> check_plan(microbatches=10, accumulate=4, epochs=2)
        5
        >>> check_plan(microbatches=10, accumulate=4, max_steps=2)
        2
    """
    _check_accumulate(accumulate)
    _check_tail(tail)
    if epochs < 1 or (max_steps is not None and max_steps < 0):
        raise InvalidArgument(
            "epochs, max_steps", expected=">= 1, >= 0", found=f"{epochs}, {max_steps}", fix="count in whole units"
        )
    if microbatches is None:
        return max_steps
    whole, rest = divmod(microbatches * epochs, accumulate)
    if max_steps is not None and max_steps <= whole:
        return max_steps
    if rest and tail == "raise":
        raise BatchNotDivisible(
            "accumulate",
            expected=f"a divisor of {microbatches} microbatches x {epochs} epochs = {microbatches * epochs}",
            found=f"{accumulate} (remainder {rest})",
            fix=f'set max_steps <= {whole}, choose tail="drop" or tail="step", or change accumulate',
        )
    steps = whole + (1 if rest and tail == "step" else 0)
    if steps == 0:
        raise InvalidArgument(
            "microbatches",
            expected=f"at least accumulate = {accumulate} of them",
            found=f"{microbatches} x {epochs} epochs, and an incomplete window is dropped",
            fix='lower accumulate, or choose tail="step"',
        )
    return steps


def _check_accumulate(accumulate: int) -> None:
    count("accumulate", accumulate, fix="1 means no accumulation")


def _check_tail(tail: str) -> None:
    choice("tail", tail, get_args(Tail), fix="pass one of these")

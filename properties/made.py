"""`made_by`: a step that each simulated process makes again, and the new process itself, for `laws.resumes_exactly`."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, final

import attrs
import torch

from trainfold.backends.runs.api import load, save
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.state import TrainState
from trainfold.properties.differences import LawBroken

Step: TypeAlias = Callable[[TrainState, Any], tuple[TrainState, Any]]


@final
@attrs.frozen
class MadeBy:
    """A step that is made again after each death. Make it with `made_by`.

    Attributes:
        make: makes the step.
        in_new_process: whether the resumed run is a new process.
    """

    make: Callable[[], Step]
    in_new_process: bool = False


def made_by(make: Callable[[], Step], *, in_new_process: bool = False) -> MadeBy:
    """A maker of a step for `laws.resumes_exactly`, which finds more with it than with a finished step.

    A step that is made once keeps what it saw first: a mean of the first batch, a cache that is filled and never changed. The
    resumed run makes its step again, as a restarted program does, and sees another batch first.

    Args:
        make: makes the step; without arguments.
        in_new_process: whether the resumed run is a new Python process, which also finds what a module keeps in its globals.
            ``make`` must then be a function of a module that can be imported, and each death costs the start of a process:
            name a few with ``at=``.

    Returns:
        What `laws.resumes_exactly` takes in place of a step.

    Examples:
        >>> from trainfold.core.state.state import Progress
        >>> from trainfold.properties import laws
        >>> def make_step():
        ...     first = []
        ...     def step(state, batch):
        ...         first.append(batch)
        ...         return state.evolve(trainer=Progress(state.trainer.step + 1, samples=first[0])), {}
        ...     return step
        >>> laws.resumes_exactly(made_by(make_step), TrainState(trainer=Progress()), [2, 3])
        Traceback (most recent call last):
            ...
        trainfold.properties.differences.LawBroken: resume: trainer.samples: 2 against 3; died after 1 of 2 steps
    """
    if not callable(make):
        raise InvalidArgument(
            "made_by.make", expected="a function that makes the step", found=repr(make)[:80], fix="give a function"
        )
    return MadeBy(make, in_new_process)


def elsewhere(
    maker: MadeBy, state: TrainState, like: TrainState, batches: Sequence[Any], after: TrainState
) -> TrainState:
    """Save a state, and take the other steps in a new process that loads it.

    Args:
        maker: makes the step there.
        state: what is saved.
        like: what the new process has before it loads.
        batches: those that are left.
        after: a state of the form that the last one should have.

    Returns:
        The last state.

    Raises:
        LawBroken: with what the new process raised.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(state, folder / "run")
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        try:
            # as one value, so that what cannot be pickled raises here and not in the new process
            task = Task(maker.make, folder, like, batches, torch.get_num_threads())
            process = context.Process(target=resume, args=(task, there))
            process.start()
        except OSError:
            raise
        except Exception as error:  # each kind of object that cannot be sent raises another error
            raise InvalidArgument(
                "made_by.make",
                expected="a maker that a new process can import, and a state and batches that can be sent to it",
                found=f"{type(error).__name__}: {error}",
                fix="define it at the top of a module, and start the program under `if __name__ == '__main__'`",
            ) from error
        finally:
            there.close()
        with here:
            failure = _received(here)
        process.join()
        if failure is not None:
            raise LawBroken("resume", "state", f"the new process failed: {failure}")
        return load(folder / "ended", like=after)


def _received(pipe: Connection) -> str | None:
    try:
        said = pipe.recv()
    except EOFError:
        return "it ended without a message"
    return None if said is None else str(said)


@final
@attrs.frozen(eq=False)
class Task:
    """The input of the new process."""

    make: Callable[[], Step]
    folder: Path
    like: TrainState
    batches: Sequence[Any]
    threads: int


def resume(task: Task, pipe: Any) -> None:
    """The work of the new process; it sends None at the end, or the error."""
    try:
        torch.set_num_threads(task.threads)
        state = load(task.folder / "run", like=task.like)
        step = task.make()
        for batch in task.batches:
            state, _ = step(state, batch)
        save(state, task.folder / "ended")
        pipe.send(None)
    except BaseException as error:  # noqa: BLE001 (the other process raises it, whatever it is)
        pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")

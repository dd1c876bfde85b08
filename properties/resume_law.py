"""The resume law: a run that stops anywhere, saves, and resumes ends with the bits of the whole run. Part of `trainfold.properties.laws`.

Also `made_by`: a step that each simulated process makes again, and the new process itself.
"""

import itertools
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, final

import attrs
import torch

from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import with_article
from trainfold.core.state.state import TrainState
from trainfold.properties.differences import LawBroken, check_same, clone

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
    """Wrap a function that makes a step: `laws.resumes_exactly` finds more with it than with a finished step.

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
        >>> from trainfold import Progress
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


def resumes_exactly(
    step: Step | MadeBy,
    state: TrainState,
    batches: Sequence[Any],
    *,
    store: Store | Callable[[], Store] = MemoryStore,
    at: Iterable[int] | None = None,
) -> None:
    """Resume: k steps, save, lose everything, load, the other steps equal all steps at once, bit for bit, in every component.

    What a step keeps outside of the state is lost too: between the save and the load the same step makes a detour, from other
    weights and with other batches, so that its own average, momentum or counter no longer has the value that the saved run left,
    also if it restarts at step 0. Each k costs all steps and k + 2 of the detour, so all k of n batches cost about 1.5 n**2.
    A detour cannot change a cache that is filled once and never again: pass a maker of the step for that,
    ``made_by(make_step)``. The resumed run then makes its step again, in a new process if asked.

    Args:
        step: any step, also one that donates; or `made_by` of a function that makes it, which finds more.
        state: the first state.
        batches: the batches of the whole run.
        store: where to save, or a function that makes an empty store for each k; a new process resumes from a folder.
        at: the numbers of steps after which to stop; None for every one from 0 to all.

    Raises:
        LawBroken: naming the first leaf that differs, and k.
        InvalidArgument: for a maker that a new process cannot import, for batches that are not a list, and for an empty ``at``.

    Examples:
        >>> from trainfold import Progress
        >>> def count(state, batch):
        ...     done = Progress(state.trainer.step + 1, samples=state.trainer.samples + batch)
        ...     return state.evolve(trainer=done), {}
        >>> resumes_exactly(count, TrainState(trainer=Progress()), [2, 3, 5])
        >>> resumes_exactly(made_by(lambda: count), TrainState(trainer=Progress()), [2, 3, 5])
    """
    dies_after = _deaths(batches, at)
    made = step if isinstance(step, MadeBy) else MadeBy(lambda: step)
    whole = run_steps(made.make(), clone(state), batches)
    for k in dies_after:
        place = store() if callable(store) else store
        dying = made.make()
        half = run_steps(dying, clone(state), batches[:k])
        save(half, place)
        at_step = half.trainer.step if half.trainer is not None else None
        rest = batches[k:]
        detour(dying, state, [batches[-1], *itertools.islice(itertools.cycle(rest), k + 1)] if len(rest) else [])
        resumed = load(place, like=clone(state), step=at_step)
        check_same("resume", half, resumed, f"loaded after {k} steps")
        died = f"died after {k} of {len(batches)} steps"
        check_same("resume", whole, run_steps(made.make(), clone(resumed), rest), died)
        if made.in_new_process:
            ended = elsewhere(made, resumed, clone(state), rest, whole)
            check_same("resume", whole, ended, f"{died}, and resumed in a new process")


def _deaths(batches: object, at: Iterable[int] | None) -> list[int]:
    """The numbers of steps after which to stop; at least one, because a law that checks nothing would always hold."""
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
        raise InvalidArgument(
            "resumes_exactly.batches",
            expected="a list, which each run reads from the start",
            found=f"{with_article(type(batches).__name__)}",
            fix="pass list(batches)",
        )
    found = [*range(len(batches) + 1)] if at is None else [*at]
    if not found or not all(type(k) is int and 0 <= k <= len(batches) for k in found):
        raise InvalidArgument(
            "resumes_exactly.at",
            expected=f"one or more numbers of steps in [0, {len(batches)}]",
            found=found or "none",
            fix="pass some, such as at=[1], or leave it out for all of them",
        )
    return found


def run_steps(step: Step, state: TrainState, batches: Sequence[Any]) -> TrainState:
    """Return the state after all batches."""
    for batch in batches:
        state, _ = step(state, batch)
    return state


def try_step(step: Step, state: TrainState, batch: Any) -> TrainState | None:
    """Return a copy of the next state, or None if the step fails, for example at the end of its data or its schedule."""
    try:
        return clone(step(clone(state), batch)[0])
    except Exception:  # noqa: BLE001 (a step may end where its data or its schedule do)
        return None


def detour(step: Step, state: TrainState, batches: Sequence[Any]) -> None:
    """Change whatever a step keeps outside of the state: the first batch leads to other weights, the others continue from there.

    They start at the position of ``state``, so that a cache that restarts at step 0 restarts there, with other weights. The caller
    passes another number of batches than the steps that it made from there, so that a counter cannot agree by accident.
    """
    if not batches:
        return
    start = clone(state)
    elsewhere, _ = step(clone(state), batches[0])
    run_steps(
        step,
        elsewhere.evolve(trainer=start.trainer, scheduler=start.scheduler, dataset=start.dataset),
        batches[1:],
    )


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
            task = ResumeTask(maker.make, folder, like, batches, torch.get_num_threads())
            process = context.Process(target=resume_in_child, args=(task, there))
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
class ResumeTask:
    """The input of the new process."""

    make: Callable[[], Step]
    folder: Path
    like: TrainState
    batches: Sequence[Any]
    threads: int


def resume_in_child(task: ResumeTask, pipe: Any) -> None:
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

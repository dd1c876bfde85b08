"""`check_live_steps`: runs one step in so many of an attached loop twice from the same state, and compares the bits."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from trainfold.adapters.components.component import copied
from trainfold.adapters.flight.check_steps import judge_step, leaves_apart
from trainfold.adapters.live.live import Live
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.world import Collectives
from trainfold.core.state.state import TrainState

P = ParamSpec("P")
R = TypeVar("R")


def check_live_steps(
    live: Live, step: Callable[P, R], *, every: int, collectives: Collectives | None = None
) -> Callable[P, R]:
    """The same step of an attached loop, of which one in ``every`` runs twice from the same state and batch, and whose bits are compared. What it leaves is the same.

    Before the second run everything attached, the random streams and the gradients are put back in place; counters and the position in the data do not move
    in a step. What is not attached runs twice: if the step depends on it, the bits differ, and that is an error. On several ranks it also compares the new states of the
    ranks, as `check_steps` does. A check costs one more step, two copies of the state, writing it back and a comparison, and memory for two more states.

    Args:
        live: the attached objects.
        step: does one optimizer step: forward, backward, ``optimizer.step()``, and those of schedulers, scalers and averages. It gets its batch as arguments, and
            neither draws one nor calls ``live.advance``. What it returns, such as the loss, is compared too.
        every: check the steps whose number is a multiple of it.
        collectives: the ranks, which all call; None for one, or for ranks that have parts of the state.

    Raises:
        InvalidArgument: for a number below 1; by the step, if it counts itself with ``live.advance``.
        StepNotRepeated: by the step, on every rank, with the rank, and the leaves that differ.

    Examples:
        >>> import torch, trainfold
        >>> model = torch.nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> live = trainfold.attach(model, sgd)
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     sgd.zero_grad()
        ...     loss.backward()
        ...     sgd.step()
        ...     return loss
        >>> loss = check_live_steps(live, step, every=1)(torch.ones(2, 1))
        >>> live.advance(samples=2).step
        1
    """
    count("check_live_steps.every", every, fix="1 checks every step, and doubles its time")

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = live.progress
        number = before.step + 1
        if number % every:
            return step(*args, **kwargs)
        redo = live.redo()
        words, named = copied((args, kwargs))  # a step may write to its batch
        once = copied((step(*words, **named), redo.values()))
        if live.progress != before:
            raise InvalidArgument("check_live_steps.step", expected="a step that is counted after it", found="one that calls live.advance",
                                  fix="leave live.record, live.advance and manager.step out of the step, and call them after it")  # fmt: skip
        redo.back()
        result = step(*args, **kwargs)
        values = redo.values()
        unlike = [*leaves_apart(once[1], values), *leaves_apart({"result": once[0]}, {"result": result})]
        alike = TrainState(model=values.get("model"), optimizer=values.get("optimizer"))
        judge_step(number, unlike, alike, collectives)
        return result

    return run

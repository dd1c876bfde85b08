"""`check_live_steps`: runs one step in so many of an attached loop twice from the same state, and compares the bits."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from trainfold.adapters.components.component import copied
from trainfold.adapters.flight.check_steps import judge_step, leaves_apart
from trainfold.adapters.live.live import Live
from trainfold.adapters.sharded.fsdp2_groups import HELD_BACK
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument
from trainfold.core.layout.world import Collectives
from trainfold.core.state.state import TrainState

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")


def check_live_steps(
    live: Live, step: Callable[P, R], *, every: int, collectives: Collectives | None = None
) -> Callable[P, R]:
    """The same step of an attached loop, of which one in ``every`` runs twice from the same state and batch, and whose bits are compared. What it leaves is the same.

    Before the second run everything attached, the random streams and the gradients are put back in place; counters and the position in the data do not move
    in a step. What is not attached runs twice: if the step depends on it, the bits differ, and that is an error. On several ranks it also compares the new parameters
    and the states of the optimizers of the ranks, as `check_steps` does. The first step of a process under `torch.nn.parallel.DistributedDataParallel` on three or more ranks is not checked, with a warning: DDP sums in another
    order after its first backward. A check costs one more step, two copies of the state, writing it back and a comparison, and memory for two more states.

    Args:
        live: the attached objects.
        step: does one optimizer step: forward, backward, ``optimizer.step()``, and those of schedulers, scalers and averages. It gets its batch as arguments, and
            neither draws one nor calls ``live.advance``. Tensors, arrays and numbers of what it returns, such as the loss, are compared too, also in tuples,
            dicts and dataclasses.
        every: check the steps whose number is a multiple of it.
        collectives: the ranks, which all call; None for one, or for ranks that have parts of the state.

    Raises:
        InvalidArgument: for a number below 1; by the step, at its first call for arguments that cannot be copied, at that or at a check if FSDP2 holds back its
            gradients, and at a check if a forward of DDP without a backward changes which of its backwards sum, if it counts itself with ``live.advance``, or
            steps the optimizers more often in one of the two runs.
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
    is_known = False

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_known
        before = live.progress
        number = before.step + 1
        if number % every and is_known:
            return step(*args, **kwargs)
        words, named = _copied(dict(enumerate(args))).values(), _copied(kwargs)  # a step may write to its batch
        is_known = True
        if number % every:
            result = step(*args, **kwargs)
            _check_reduced(live)  # now, and not at the first check, which may come after hours
            return result
        if live.sums_change:
            log_for_all("step %d is not checked: DDP takes the order in which it sums gradients from a backward that is still to come", number)  # fmt: skip
            return step(*args, **kwargs)
        _check_reduced(live)
        redo = live.redo()
        untaken = redo.steps()
        with redo.first_run():
            result_once = _compared(step(*words, **named))
        values_once = copied(redo.values())
        taken = redo.steps()
        is_open = taken == untaken  # a window whose gradients no state shows yet
        gradients_once = copied(redo.gradients()) if is_open else {}
        _check_reduced(live)
        if live.progress != before:
            raise _no_step("a step that is counted after it", "one that calls live.advance",
                           "leave live.record, live.advance and manager.step out of the step, and call them after it")  # fmt: skip
        if redo.is_lost:
            raise _no_step("a backward in the same call for each forward of DistributedDataParallel that is to sum gradients",
                           "a call that ends with such a forward alone, and one that begins in no_sync(): DDP sums its first backward, and not in a second run",
                           "call the wrapper in torch.no_grad() where no backward follows")  # fmt: skip
        redo.back()
        result = step(*args, **kwargs)
        if (again := redo.steps()) != taken:
            raise _no_step("as many steps of optimizers from the same state", f"{_text(taken)}, and then {_text(again)}",
                           "let the step be all of one optimizer step, with each of its micro-batches; what it counts itself runs on in the second run")  # fmt: skip
        values = redo.values()
        unlike = [
            *leaves_apart(values_once, values),
            *leaves_apart({"gradients": gradients_once}, {"gradients": redo.gradients() if is_open else {}}),
            *leaves_apart({"result": result_once}, {"result": _compared(result)}),
        ]
        alike = TrainState(model=values.get("model"), optimizer=values.get("optimizer"))
        judge_step(number, unlike, alike, collectives)
        return result

    return run


def _no_step(expected: str, found: str, fix: str) -> InvalidArgument:
    return InvalidArgument("check_live_steps.step", expected=expected, found=found, fix=fix)


def _check_reduced(live: Live) -> None:
    if live.holds_gradients_back:
        raise _no_step("gradients that each call synchronises, to put them back and to compare them", HELD_BACK,
                       "let one call be all micro-batches of one optimizer step; or call set_requires_gradient_sync(True) before each backward")  # fmt: skip


def _text(steps: Mapping[str, int]) -> str:
    return ", ".join(f"{taken} of {name}" for name, taken in sorted(steps.items())) or "none"


def _copied(arguments: Mapping[K, Any]) -> dict[K, Any]:
    """Copies of arguments for the first run; one that cannot be copied is named."""
    found = {}
    for name, argument in arguments.items():
        try:
            found[name] = copied(argument)
        except Exception as error:  # whatever its class raises
            raise _no_step("arguments that can be copied, since a step may write to its batch", f"{type(argument).__qualname__} as argument {name}: {error}",
                           "pass tensors, and have the step take what it only uses from around it") from error  # fmt: skip
    return found


def _compared(result: Any) -> Any:
    """What of a result is compared, as containers and copies of tensors and arrays; an object of another kind has no bits to compare."""
    if isinstance(result, torch.Tensor):
        return result.detach().clone()
    if isinstance(result, Mapping):
        return {str(name): _compared(each) for name, each in result.items()}
    if isinstance(result, list | tuple):
        return [_compared(each) for each in result]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {each.name: _compared(getattr(result, each.name, None)) for each in dataclasses.fields(result)}
    if hasattr(result, "tobytes"):
        return result.copy()
    return result if isinstance(result, bool | int | float | complex | str | bytes) else None

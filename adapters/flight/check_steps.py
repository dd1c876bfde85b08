"""`check_steps`: runs one pure step in so many twice, and compares the bits: a device that computes wrongly seldom does so twice alike."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainfold.adapters.flight.pure_steps import B, PureStep, RecordedStep, S, counted
from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument, StepNotRepeated
from trainfold.core.exact.distance import distance
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.json_values import shown
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.world import Collectives
from trainfold.core.state.components import components_of
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import TrainState
from trainfold.core.step.step import Step
from trainfold.core.tensor_memory import byte_view

_SHOWN = 6


def check_steps(step: PureStep[S, B], *, every: int, collectives: Collectives | None = None) -> PureStep[S, B]:
    """The same step, of which one in ``every`` runs twice from the same state, and whose bits are compared. The result is the same.

    On one device this finds transient faults, and operations that do not repeat. On several ranks whose replicas have one state, it also compares the new parameters and
    the states of the optimizers of the ranks, which finds a machine that is wrong in the same way twice. A check costs one more step, a comparison of the states, and memory
    for one more state; with donation, the first of the two copies its state.

    Args:
        step: what `make_step` returns, the same recorded, or a pure function whose states count their steps.
        every: check the steps whose number is a multiple of it.
        collectives: the ranks, which all call; None for one, or for ranks that have parts of the state.

    Raises:
        InvalidArgument: for a number below 1; by the step, at its first call, for a function around a step that donates.
        StepNotRepeated: by the step, on every rank, with the rank, and the leaves that differ. With ``donate=True`` the old state is consumed.
        InvalidState: by the step, if the state does not count its steps.

    Examples:
        >>> from trainfold import Loss, init_state, make_step, optimizer
        >>> model, sgd = torch.nn.Linear(1, 1), optimizer(torch.optim.SGD, lr=0.5)
        >>> step = make_step(model, lambda model, batch: Loss(model(batch).sum(), len(batch)), sgd)
        >>> state, _ = check_steps(step, every=1)(init_state(model, sgd), torch.ones(2, 1))
        >>> state.trainer.step
        1
    """
    count("check_steps.every", every, fix="1 checks every step, and doubles its time")
    if isinstance(step, RecordedStep):  # one record for both runs
        return attrs.evolve(step, step=check_steps(step.step, every=every, collectives=collectives))
    first: Any = attrs.evolve(step, donate=False) if isinstance(step, Step) and step.donate else step

    def run(state: S, batch: B) -> tuple[S, Mapping[str, Any]]:
        number = counted(state) + 1
        once = (step if number % every else first)(state, batch)
        if first is step:
            _check_kept(state)
        if number % every:
            return once
        twice = step(state, batch)
        judge_step(number, _unlike(once, twice), twice[0], collectives)
        return twice

    return run


def _check_kept(state: TrainState) -> None:
    if state.model is not None and isinstance(state.model.params, Leaves) and state.model.params.is_donated:
        raise InvalidArgument("check_steps.step", expected="a step that leaves its state, which has to run twice", found="a function around a step with donate=True",
                              fix="check the step that donates itself, and put the function around that: check_steps(step, every=...)")  # fmt: skip


def judge_step(number: int, unlike: list[str], state: TrainState, collectives: Collectives | None) -> None:
    """Raise if a step has not repeated itself on some rank, or if ranks have other states after it.

    Args:
        number: of the step.
        unlike: what differs between the two runs of this rank.
        state: after the second.
        collectives: the ranks, which all call; None for one.

    Raises:
        StepNotRepeated: on every rank.
    """
    digest = None if collectives is None else fingerprint(_alike_on_ranks(state))
    told = (
        [(unlike, digest)]
        if collectives is None
        else collectives.gather((unlike, digest), doing=f"check step {number}")
    )
    bad = {rank: leaves for rank, (leaves, _) in enumerate(told) if leaves}
    if bad:
        parts = [f"{_of(rank, told)}{len(leaves)} differ: {'; '.join(leaves[:_SHOWN])}" for rank, leaves in bad.items()]
        raise StepNotRepeated(
            f"step {number}",
            expected="the same bits twice, from the same state and batch",
            found=", ".join(parts),
            fix="go on from the last checkpoint; if it comes again on the same machine alone, take that machine out; if it comes everywhere, an operation does "
            "not repeat: call torch.use_deterministic_algorithms(True)",
        )
    digests = [digest for _, digest in told]
    most = max(digests, key=digests.count)
    if digests.count(most) < len(digests):
        apart = [rank for rank, each in enumerate(digests) if each != most]
        is_clear = 2 * digests.count(most) > len(digests)
        raise StepNotRepeated(
            f"step {number}",
            expected="the same new state on every rank",
            found=f"another one on rank{'s' if len(apart) > 1 else ''} {', '.join(map(str, apart))}"
            if is_clear
            else "no state that most ranks have",
            fix=f"go on from the last checkpoint, {'without the machine of that rank' if is_clear else 'on other machines: which of these is wrong is not known'}; "
            "each rank had the same bits twice, so it is wrong in the same way each time, or its state was another one before: pass check_replicas=500 to the "
            "manager to find that",
        )


def _alike_on_ranks(state: TrainState) -> TrainState:
    """What ranks with one state have alike after each step; buffers, such as the statistics of a batch norm, may be of the batch of each."""
    model = state.model and attrs.evolve(state.model, buffers=Leaves({}))
    return TrainState(model=model, optimizer=state.optimizer)


def _of(rank: int, told: list[Any]) -> str:
    return "" if len(told) == 1 else f"on rank {rank} "


def _unlike(once: tuple[TrainState, Mapping[str, Any]], twice: tuple[TrainState, Mapping[str, Any]]) -> list[str]:
    """The leaves and metrics that differ, each with by how much."""
    (one, metrics), (other, again) = once, twice
    numbers = (
        f"{name} ({metrics[name]!r} and {again[name]!r})"
        for name in metrics
        if repr(metrics[name]) != repr(again.get(name))
    )
    return [*leaves_apart(components_of(one), components_of(other)), *numbers]


def leaves_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The leaves of two states that differ, each with by how much.

    Args:
        one: component -> its value.
        other: the same components.
    """
    found = []
    for name, component in one.items():
        pair = component, other.get(name)
        if tree.structure(pair[0]) == tree.structure(pair[1]):
            texts = [_apart(*leaves) for leaves in zip(*map(tree.leaves, pair), strict=True)]
            if any(text is not None for text in texts):  # paths take as long as the comparison
                named = zip(tree.paths(component, name), texts, strict=True)
                found += [f"{path} ({text})" for path, text in named if text is not None]
        else:
            found.append(f"{name} (other leaves)")
    return found


def _apart(one: Any, other: Any) -> str | None:
    if isinstance(one, Shard) and isinstance(other, Shard):
        one, other = one.tensor, other.tensor  # a Shard has no equality, and its text rounds and shortens
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if _is_same(one, other) else f"{shown(one)} and {shown(other)}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if torch.equal(byte_view(one.detach()), byte_view(other.detach())):
        return None
    return str(distance(one.detach().cpu(), other.detach().cpu()))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two leaves that are not both tensors are the same: arrays by their bits; a NaN is as itself."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return type(one) is type(other) and (bool(one == other) or repr(one) == repr(other))

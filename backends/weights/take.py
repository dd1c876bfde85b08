"""`take_weights`: a state with the weights that a source supplies. `plan_weights`: where they would come from. `received`: what a source supplies, each tensor accounted for."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

import attrs
import torch

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.ranks.in_process import ALONE
from trainfold.backends.weights.plan import planned
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.world import Collectives
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.masters import refresh_masters
from trainfold.core.state.notes import LINEAGE
from trainfold.core.state.state import ModelState, OptimizerState, TrainState
from trainfold.core.tensor_memory import is_same_memory, tensor_bytes
from trainfold.core.weights.account import Account
from trainfold.core.weights.asked import asked_of, left_to
from trainfold.core.weights.several.cover import Coverage
from trainfold.core.weights.source import Wanted, WeightSource, source_name
from trainfold.core.weights.supplied import part_of, supplied
from trainfold.core.weights.wrapped import ByScript, Frozen


def take_weights(state: TrainState, source: WeightSource, *, collectives: Collectives | None = None) -> TrainState:
    """Return a state with the weights of a source: all parameters and persistent buffers of its model.

    fp32 masters are made again from them, so the next step starts there; of the rest of the state nothing changes. A run whose checkpoints leave
    out its model calls it where it begins, and after each load.

    Args:
        state: with a model. It is not changed.
        source: one of ``trainfold.weights``, or one's own.
        collectives: the ranks, all of which call; None for this process alone.

    Returns:
        The state; its weights are fresh memory on the devices of those before.

    Raises:
        InvalidArgument: for a state without a model, or something else than a source of all its weights.
        InvalidState: for a tensor that is missing, that was not asked for, that comes twice, or has another dtype or shape. On the other ranks it is `RankFailed`.
        SourceFailed: for an error of the source's own, which is the cause.

    Examples:
        >>> import trainfold
        >>> class Ones:
        ...     def supply(self, wanted):
        ...         return ((name, torch.ones(each.shape)) for name, each in wanted.items())
        >>> state = trainfold.init_state(torch.nn.Linear(2, 1), trainfold.optimizer(torch.optim.SGD, lr=0.1))
        >>> take_weights(state, Ones()).model.params["weight"]
        tensor([[1., 1.]])
    """
    model = _checked(state, source, "take_weights")
    leaves = {**model.params, **model.buffers}

    wanted, world = asked_of(leaves, model.ties), ALONE if collectives is None else collectives
    plan = planned(source, wanted, world)

    def taken() -> dict[str, Any]:
        found: dict[str, torch.Tensor] = {}

        def memory(name: str) -> torch.Tensor:
            mine = leaves[name]
            if name not in found:
                found[name] = torch.empty_like(mine.tensor if isinstance(mine, Shard) else mine)
            return found[name]

        with closing(received(plan.source, left_to(wanted, plan.coverage), memory)) as parts:
            for name, part in parts:
                memory(name).copy_(part)
        return {
            name: mine
            if name not in found
            else attrs.evolve(mine, tensor=found[name])
            if isinstance(mine, Shard)
            else found[name]
            for name, mine in leaves.items()
        }

    mine: list[dict[str, Any]] = []
    on_all_ranks(world, lambda: mine.append(taken()), doing="take its weights")
    found = mine[0]
    params = Leaves({name: found[name] for name in model.params})
    buffers = Leaves({name: found[name] for name in model.buffers})
    optimizer = state.optimizer
    if isinstance(optimizer, OptimizerState) and optimizer.masters is not None:
        optimizer = refresh_masters(optimizer, params)
    contract = {**state.contract, LINEAGE: plan.lineage}
    return state.evolve(
        model=attrs.evolve(model, params=params, buffers=buffers), optimizer=optimizer, contract=contract
    )


def plan_weights(state: TrainState, source: WeightSource, *, collectives: Collectives | None = None) -> Coverage:
    """Say which source each tensor of a model would come from; nothing is read, and nothing is refused: the problems are part of it.

    Args:
        state: with a model, such as ``live.capture()``.
        source: as for `take_weights`, or `attach`.
        collectives: the ranks, all of which call; None for this process alone.

    Raises:
        InvalidArgument: for a state without a model, or something else than a source of all its weights.

    Examples:
        >>> import trainfold
        >>> from trainfold.weights import ByScript, SeveralSources, LoadSpec
        >>> class Ones:
        ...     def supply(self, wanted):
        ...         return ((name, torch.ones(each.shape)) for name, each in wanted.items())
        >>> state = trainfold.init_state(torch.nn.Linear(2, 1), trainfold.optimizer(torch.optim.SGD, lr=0.1))
        >>> print(plan_weights(state, SeveralSources([LoadSpec(Ones(), names="weight"), ByScript()])))
        Ones(): 1 tensors; not listed, so looked at when it comes
        ByScript(): 1 tensors
    """
    model = _checked(state, source, "plan_weights")
    wanted = asked_of({**model.params, **model.buffers}, model.ties)
    return planned(source, wanted, ALONE if collectives is None else collectives, is_dry=True).coverage


def _checked(state: TrainState, source: WeightSource, where: str) -> ModelState:
    """The model of a state, for which the source is one of all its weights.

    Raises:
        InvalidArgument: if there is none, or it is not.
    """
    if not isinstance(source, WeightSource) or isinstance(source, Frozen | ByScript):
        raise InvalidArgument(
            f"{where}.source",
            expected="a WeightSource that supplies all weights of the model",
            found=type(source).__qualname__,
            fix="pass one of trainfold.weights, such as trainfold.weights.CheckpointWeights(run)",
        )
    if state.model is None:
        raise InvalidArgument(f"{where}.state", expected="a state with a model", found="none",
                              fix="pass the state of init_state(model, optimizer), whose weights are replaced")  # fmt: skip
    return state.model


def received(
    source: WeightSource, wanted: Mapping[str, Wanted], memory: Callable[[str], torch.Tensor]
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the first name of each tensor that a source supplies, and this rank's part of it. Copy it into the memory of that name before you ask for the next one.

    What the source has read into that memory itself is not yielded.

    Args:
        source: of the weights.
        wanted: what it is asked for.
        memory: returns the memory of this rank's part of the tensor with a first name; a tied tensor may come once more under another name, with the same bits.

    Raises:
        InvalidState: for a tensor that is missing at the end, that was not asked for, that comes twice, or that has another dtype, shape or, tied, other bits.
        SourceFailed: for an error of the source's own.
    """
    account = Account(source, wanted)
    given = set[str]()

    def once(name: str) -> torch.Tensor | None:
        """The memory of a tensor, for the first of its names."""
        first = account.first_name(name)
        if first in given:
            return None
        given.add(first)
        return memory(first)

    with closing(supplied(source, wanted, once)) as tensors:
        for name, tensor in tensors:
            earlier = account.came_as(name)
            part = part_of(source, account, name, tensor)
            first = account.first_name(name)
            if earlier is None:
                if not is_same_memory(memory(first), part):
                    yield first, part
            elif tensor_bytes(memory(first)) != tensor_bytes(part):
                raise InvalidState(
                    f"weights[{name!r}] from {source_name(source)}",
                    expected=f"the bits of {earlier!r}, to which it is tied in this model",
                    found="others",
                    fix="untie them in the model, or supply one of the two names",
                )
    problem = account.problem()
    if problem is not None:
        raise problem

"""The outer step of DiLoCo: what many workers have trained apart becomes one update of the weights that they share."""

from collections.abc import Mapping, Sequence
from typing import Final, final

import attrs
import torch

from trainfold.core.diloco.fragments import Fragments
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.state.fqn import named_tensors
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.core.step.optimizer import Optimizer, optimizer

NESTEROV: Final = optimizer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper (Douillard et al., DiLoCo, arXiv:2311.08105)."""


@final
@attrs.frozen
class Contribution:
    """What a worker has made of its unit.

    Attributes:
        weight: how many samples it has trained on. 0 for a worker that is absent: its tensors do not matter.
        tensors: name -> the weights of the due fragment after training, in the dtype in which the worker has taken and trained them.
    """

    weight: int
    tensors: Mapping[str, torch.Tensor]


def outer_state(model: torch.nn.Module, *, optimizer: Optimizer = NESTEROV) -> TrainState:
    """Make the state before the first round.

    Trained parameters are float64, so that an outer step that is smaller than the last bit of the workers' dtype is not lost. Frozen parameters and
    persistent buffers stay as they are.

    Args:
        model: with its first weights; it is copied.
        optimizer: the outer one.

    Returns:
        A state to save and load as any other: ``model``, ``optimizer`` and ``trainer``, which counts rounds and samples.

    Raises:
        InvalidState: if nothing is trained, or the model has no values yet.

    Examples:
        >>> state = outer_state(torch.nn.Linear(2, 1))
        >>> state.model.params["weight"].dtype, state.trainer.step
        (torch.float64, 0)
    """
    named = named_tensors(model)
    for name, each in {**named.params, **named.buffers}.items():
        if each.is_meta:
            raise InvalidState(
                f"model[{name!r}]",
                expected="the first weights of the run",
                found="a tensor on meta",
                fix="build the server's model as usual; only workers build theirs on meta",
            )
    params = {name: each.detach().clone() for name, each in named.params.items()}
    trained = {
        name: params[name].double()
        for name, each in named.params.items()
        if each.requires_grad and each.is_floating_point()
    }
    if not trained:
        raise InvalidState(
            "model", expected="parameters that are trained", found="none", fix="pass a model with requires_grad"
        )
    buffers = Leaves({name: each.detach().clone() for name, each in named.buffers.items()})
    return TrainState(
        model=ModelState(Leaves({**params, **trained}), buffers, named.ties),
        optimizer=optimizer.init(trained),
        trainer=Progress(),
    )


def trained_elements(state: TrainState) -> dict[str, int]:
    """The parameters that the outer optimizer of a state steps, with their numbers of elements: the argument of `fragments_of`.

    Examples:
        >>> trained_elements(outer_state(torch.nn.Linear(2, 1)))
        {'weight': 2, 'bias': 1}
    """
    model = _model(state)
    trained = {name for group in state.optimizer.groups for name in group.params}
    return {name: each.numel() for name, each in model.params.items() if name in trained}


def check_outer_optimizer(state: TrainState, optimizer: Optimizer) -> None:
    """Check that an optimizer is the one that a state was made for.

    Raises:
        InvalidArgument: naming the class and the options of both.

    Examples:
        >>> check_outer_optimizer(outer_state(torch.nn.Linear(2, 1)), NESTEROV)
    """
    model = _model(state)
    names = [name for group in state.optimizer.groups for name in group.params]
    fresh = optimizer.init({name: model.params[name] for name in names})
    (mine, theirs) = ((each.kind, each.groups) for each in (fresh, state.optimizer))
    if mine != theirs:
        shown = [f"{kind} with {dict(groups[0].hyper)}" for kind, groups in (theirs, mine)]
        raise InvalidArgument(
            "optimizer",
            expected=f"that of the state, {shown[0]}",
            found=shown[1],
            fix="pass the same optimizer= to outer_state and to DilocoServer",
        )


def pseudo_gradient(weights: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """How far a worker has moved, in the direction of a gradient: where it began, less where it is.

    It began at the shared weights as rounded to its own dtype, so that what the rounding has taken away is not counted as its work.

    Args:
        weights: of the state, float64.
        local: those of the worker.

    Examples:
        >>> pseudo_gradient(torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.75]))
        tensor([0.2500], dtype=torch.float64)
    """
    return weights.to(local.dtype).double() - local.double()


def average(terms: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The mean of tensors, each with its weight, in float64.

    Law: the order of the terms does not change a bit. The values of each element are sorted before they are summed, so it makes no difference who is
    who. Terms of weight 0 do not count, whatever they are.

    Args:
        terms: weight and tensor; at least one with a weight.

    Examples:
        >>> average([(3, torch.tensor([1.0])), (1, torch.tensor([5.0])), (0, torch.tensor([float("nan")]))])
        tensor([2.], dtype=torch.float64)
    """
    counted = [(weight, each) for weight, each in terms if weight > 0]
    total = sum(weight for weight, _ in counted)
    parts = torch.stack([each.double() * (weight / total) for weight, each in counted]).sort(dim=0).values
    found = parts[0].clone()
    for each in parts[1:]:  # not sum(), whose order is torch's
        found += each
    return found


def outer_step(
    state: TrainState, contributions: Sequence[Contribution], fragments: Fragments, *, optimizer: Optimizer = NESTEROV
) -> TrainState:
    """Return the state after a round: a step of the outer optimizer on the fragment that is due.

    Laws: the order of the contributions does not change a bit. A contribution of weight 0 is as one that is not there, and without any the state is
    the same. With one worker, one inner step a round and plain SGD at lr 1 outside, the workers have the bits of the inner optimizer alone; this ends
    where float64 cannot hold the difference: at a weight that shrinks to less than 2**-28 of what it was in one round, and at -0.0, which becomes 0.0.

    Args:
        state: of `outer_state`, or of the round before.
        contributions: of this round, each with the tensors of ``fragments.due(state.trainer.step)``.
        fragments: of the trained parameters.
        optimizer: that of `outer_state`.

    Returns:
        The new state. ``trainer`` has one more round, and the samples of those who contributed.

    Examples:
        >>> from trainfold.core.diloco.fragments import fragments_of
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sgd = optimizer(torch.optim.SGD, lr=1.0)
        >>> state = outer_state(model, optimizer=sgd)
        >>> fragments = fragments_of(trained_elements(state))
        >>> found = [Contribution(8, {"weight": torch.tensor([[value]])}) for value in (2.0, 4.0)]
        >>> outer_step(state, found, fragments, optimizer=sgd).model.params["weight"].item()
        3.0
    """
    counted = [each for each in contributions if each.weight > 0]
    if not counted:
        return state
    model, trainer = _model(state), state.trainer or Progress()
    due = fragments.due(trainer.step)
    weights = {name: model.params[name] for name in due}
    moved = {
        name: average([(each.weight, pseudo_gradient(weights[name], each.tensors[name])) for each in counted])
        for name in due
    }
    stepped, after = optimizer.update(moved, _part(state.optimizer, due), weights)
    return state.evolve(
        model=attrs.evolve(model, params=Leaves({**model.params, **stepped})),
        optimizer=_merged(state.optimizer, after, model.params),
        trainer=attrs.evolve(
            trainer, step=trainer.step + 1, samples=trainer.samples + sum(each.weight for each in counted)
        ),
    )


def _model(state: TrainState) -> ModelState:
    if state.model is None or not isinstance(state.optimizer, OptimizerState):
        raise InvalidState(
            "state", expected="a model and an outer optimizer", found="another state", fix="make it with outer_state"
        )
    return state.model


def _part(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    groups = tuple(
        ParamGroup(each.hyper, tuple(name for name in each.params if name in set(names))) for each in state.groups
    )
    return attrs.evolve(
        state, slots=Leaves({name: state.slots[name] for name in names if name in state.slots}), groups=groups
    )


def _merged(state: OptimizerState, part: OptimizerState, order: Mapping[str, object]) -> OptimizerState:
    """The state with a part that has stepped; slots in the order of the model, as if all had stepped at once."""
    slots = {**state.slots, **part.slots}
    groups = tuple(
        ParamGroup(new.hyper, old.params) for old, new in zip(state.groups, part.groups, strict=True)
    )  # hyperparameters that move are counted by round
    return attrs.evolve(state, slots=Leaves({name: slots[name] for name in order if name in slots}), groups=groups)

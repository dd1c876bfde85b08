"""`optimizer_entries`: the keys and values of an optimizer in torch's directories. `whole_optimizer`: that of all stages of a pipeline."""

from collections.abc import Iterator
from typing import Any, Final

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.core.errors import InvalidState, RanksDisagree
from trainfold.core.format.structure.describe import describe
from trainfold.core.format.structure.outline import by_rule, described_by, outline_of
from trainfold.core.format.structure.rebuild import rebuild
from trainfold.core.format.structure.unite import unite
from trainfold.core.layout.stage import Stage, ranks_by_stage
from trainfold.core.layout.world import Collectives, World
from trainfold.core.state.state import OptimizerState, TrainState
from trainfold.core.torch_files.dcp_metadata import PathInState

_OPTIMIZER: Final = "optimizer"


def optimizer_entries(found: Any, *, is_flat: bool = False) -> Iterator[tuple[PathInState, Any]]:
    """The keys and the value of each entry of an optimizer, as `get_state_dict` has them.

    Args:
        found: slots and groups.
        is_flat: as with ``StateDictOptions(flatten_optimizer_state_dict=True)``: the settings of a group for each of its parameters, and one key for each entry.

    Raises:
        InvalidState: for what torch has no name for.

    Examples:
        >>> from trainfold.core.state.state import ParamGroup
        >>> sgd = OptimizerState("torch.optim.sgd.SGD", {"w": {"step": 3}}, (ParamGroup({"lr": 0.1}, ("w",)),))
        >>> list(optimizer_entries(sgd))
        [(('state', 'w', 'step'), 3), (('param_groups', 0, 'lr'), 0.1), (('param_groups', 0, 'params'), ['w'])]
        >>> list(optimizer_entries(sgd, is_flat=True))
        [(('state.w.step',), 3), (('param_groups.w.lr',), 0.1)]
    """
    if not isinstance(found, OptimizerState) or found.masters is not None:
        what = "fp32 masters beside its slots" if isinstance(found, OptimizerState) else type(found).__qualname__
        raise InvalidState("optimizer", expected="slots and groups, as torch names them", found=what,
                           fix="write the model alone: state.evolve(optimizer=None)")  # fmt: skip
    for name, slots in found.slots.items():
        for slot, value in slots.items():
            yield (f"state.{name}.{slot}",) if is_flat else ("state", name, slot), value
    for number, group in enumerate(found.groups):
        if is_flat:
            for name in group.params:
                for key, value in group.hyper.items():
                    yield (f"param_groups.{name}.{key}",), value
            continue
        for key, value in group.hyper.items():
            yield ("param_groups", number, key), value
        yield ("param_groups", number, "params"), list(group.params)


def whole_optimizer(world: Collectives, state: TrainState) -> Any:
    """The optimizer of the whole model. All ranks call.

    Args:
        world: the ranks.
        state: of this rank.

    Returns:
        That of the state; for one of stages that of all of them, with a spec in the place of each tensor.

    Raises:
        RanksDisagree: naming the leaf and both ranks, if the optimizers of the stages are not one.
    """

    def describe_mine() -> tuple[Stage | None, str]:
        if state.stage is None or state.optimizer is None:
            return state.stage, ""
        mine, _ = describe(state.optimizer, _OPTIMIZER)
        return state.stage, outline_of(by_rule(mine, World(world.rank, world.world_size), is_spread=True)).decode()

    told = on_all_ranks(world, describe_mine, doing="describe its optimizer")
    parts = ranks_by_stage([stage for stage, _ in told])
    texts = {stage: told[ranks[0]][1] for stage, ranks in parts.items()}
    if not any(texts.values()):
        return state.optimizer
    if without := [stage for stage, text in texts.items() if not text]:
        raise RanksDisagree("optimizer", expected="one on every stage", found=f"none on {without[0]} (rank {parts[without[0]][0]})",
                            fix="attach it on all ranks, or write the model alone on all: state.evolve(optimizer=None)")  # fmt: skip
    whole = unite(
        _OPTIMIZER, [(ranks, described_by(texts[stage].encode())) for stage, ranks in parts.items()], world.world_size
    ).described
    specs = list(whole.tensors.values())
    return rebuild(whole.node, _OPTIMIZER, lambda index, _: specs[index])

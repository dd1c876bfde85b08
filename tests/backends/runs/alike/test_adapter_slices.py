"""Adapters that ranks hold in slices are saved and resumed as one, with the state of their optimizer."""

import pytest
import torch

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import ResumeRefused
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

NAMES = ("layer.lora_A.default.weight", "layer.lora_B.default.weight")
WHOLE = {name: torch.arange(24.0).reshape(12, 2) + 100 * number for number, name in enumerate(NAMES)}


def adapters(world, names=NAMES, *, scale=0.0):
    """This rank's rows of the adapters, and of their moments; the base is in no checkpoint."""
    size = 12 // world.world_size

    def rows(name, factor):
        part = WHOLE.get(name, WHOLE[NAMES[0]])[size * world.rank : size * (world.rank + 1)] * factor
        return make_shard(part, shape=(12, 2), starts=(size * world.rank, 0))

    slots = Leaves({name: {"exp_avg": rows(name, 2 * scale)} for name in names})
    optimizer = OptimizerState("adam", slots, (ParamGroup({"lr": 0.1}, tuple(names)),), None)
    model = ModelState(Leaves({name: rows(name, scale) for name in names}), Leaves())
    return TrainState(model=model, optimizer=optimizer, trainer=Progress(step=1))


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 2, 4])
def test_the_slices_of_all_ranks_come_back_on_any_number_of_them(before, now):
    """P21: not the first rank's alone; the optimizer matches; nothing is added by a resume."""
    store = MemoryStore()
    run_threads(before, lambda world: save(adapters(world, scale=1.0), store, collectives=world))

    def resumed(world):
        state = load(store, like=adapters(world), collectives=world)
        assert tuple(state.model.params) == NAMES == tuple(state.optimizer.slots)
        return [(state.model.params[name].tensor, state.optimizer.slots[name]["exp_avg"].tensor) for name in NAMES]

    ranks = run_threads(now, resumed)
    for number, name in enumerate(NAMES):
        assert torch.equal(torch.cat([each[number][0] for each in ranks]), WHOLE[name])
        assert torch.equal(torch.cat([each[number][1] for each in ranks]), 2 * WHOLE[name])


def test_a_second_adapter_is_named_and_not_begun_from_nothing():
    """P21: a script that adds another adapter at each start is refused, with the names."""
    store = MemoryStore()
    run_threads(2, lambda world: save(adapters(world, scale=1.0), store, collectives=world))
    more = (*NAMES, "layer.lora_A.default_1.weight")

    def resumed(world):
        with pytest.raises(ResumeRefused, match=r"layer\.lora_A\.default_1\.weight"):
            load(store, like=adapters(world, more), collectives=world)

    run_threads(2, resumed)

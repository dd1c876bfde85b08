"""An optimizer's slots are read as the parameters are cut: a rank reads no part that another rank holds."""

import torch

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

WHOLE = torch.arange(35.0).reshape(7, 5)


def part(ranks, *, shift=0.0):
    bounds = torch.arange(7).chunk(ranks.world_size)
    rows = bounds[ranks.rank] if ranks.rank < len(bounds) else torch.arange(7, 7)
    start = int(rows[0]) if len(rows) else 7
    return Shard(WHOLE[rows] + shift, (7, 5), (start, 0))


def state(ranks, *, step, slots):
    model = ModelState(params=Leaves({"w": part(ranks, shift=step)}), buffers=Leaves(), ties=())
    held = {"w": {"step": torch.tensor(3.0), "exp_avg": part(ranks, shift=100.0)}} if slots else {}
    optimizer = OptimizerState("torch.optim.adamw.AdamW", Leaves(held), (ParamGroup({"lr": 0.1}, ("w",)),))
    return TrainState(model=model, optimizer=optimizer, trainer=Progress(step=step))


def test_slots_that_a_fresh_optimizer_does_not_have_yet_take_the_part_of_their_parameter():
    """Two, three and nine ranks read what two have saved; of nine, two have no row."""
    store = MemoryStore()
    run_threads(2, lambda ranks: save(state(ranks, step=1, slots=True), store, collectives=ranks))

    def read(ranks):
        found = load(store, like=state(ranks, step=0, slots=False), collectives=ranks)
        slot, param = found.optimizer.slots["w"]["exp_avg"], found.model.params["w"]
        wanted = part(ranks)
        assert isinstance(slot, Shard)
        assert (slot.shape, slot.starts) == (param.shape, param.starts) == (wanted.shape, wanted.starts)
        assert torch.equal(slot.tensor, wanted.tensor + 100.0)
        assert torch.equal(param.tensor, wanted.tensor + 1.0)
        assert found.optimizer.slots["w"]["step"] == 3.0
        return slot.tensor.numel()

    for world_size in (1, 2, 3, 9):
        assert sum(run_threads(world_size, read)) == WHOLE.numel()

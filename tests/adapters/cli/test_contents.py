"""`verify --contents` and `diff`: the same state saved on 1, 2 and 4 ranks is the same."""

import json

import pytest
import torch
from kit.adapters import cli_cases

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.core.format.fingerprint import content_fingerprint
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

call = cli_cases.call
answered = cli_cases.answered


def state(world=None, *, change=0.0):
    values = {"w": torch.arange(21.0).view(7, 3), "b": torch.arange(5.0) + change}
    if world is not None:
        rule = make_placement(make_mesh((world.world_size,)), [[0]])
        for name, value in values.items():
            box = rule.box(tuple(value.shape), (world.rank,))
            part = value[tuple(slice(low, high) for low, high in box)].clone()
            values[name] = Shard(part, tuple(value.shape), tuple(low for low, _ in box), placement=rule)
    return TrainState(model=ModelState(Leaves(values), Leaves()), trainer=Progress(step=3))


@pytest.fixture
def runs(tmp_path):
    """Run by number of ranks."""
    folders = {size: tmp_path / f"on{size}" for size in (1, 2, 4)}
    for size, folder in folders.items():
        if size == 1:
            save(state(), folder)
        else:
            run_threads(size, lambda world, folder=folder: save(state(world), folder, collectives=world))
    return folders


def test_the_contents_of_one_state_are_the_same_however_many_ranks_saved_it(runs, answered):
    """X05."""
    found = {size: answered("verify", run, "--contents")[0]["components"] for size, run in runs.items()}
    contents = [{each["name"]: each["contents"] for each in components} for components in found.values()]
    assert contents == [content_fingerprint(state())] * 3
    recorded = {
        next(each["fingerprint"] for each in components if each["name"] == "model") for components in found.values()
    }
    assert len(recorded) == 3  # what a save records depends on the cuts


def test_diff_reads_what_is_cut_otherwise(runs, answered, tmp_path, call):
    for size in (2, 4):
        found, _ = answered("diff", runs[1], runs[size])
        assert found["same"], json.dumps(found)
        assert found["leaves"] == []
    other = tmp_path / "changed"
    run_threads(2, lambda world: save(state(world, change=1.0), other, collectives=world))
    found, _ = answered("diff", runs[1], other, code=3)
    assert [each["name"] for each in found["leaves"]] == ["model.params['b']"]
    out, _ = call("verify", runs[2], "--contents")
    assert "however they are cut" in out

"""Checkpoints that old releases wrote load for ever; the files in tests/compat are never made again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trainfold
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.fingerprint import content_fingerprint, fingerprint
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard, make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Opaque, Progress, TrainState

COMPAT = Path(__file__).parents[1] / "compat"
VERSIONS = sorted(path.name for path in COMPAT.glob("v*"))
POSITIONS = sorted(f"{path.parent.name}/{path.name}" for path in COMPAT.glob("positions/v*/*"))


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_of_every_schema_version_loads_with_the_bits_it_had(version, step, tmp_path):
    """R10: later releases load a checkpoint of release N, with every dtype, unusual scalar and tied weight."""
    shutil.copytree(COMPAT / version / "run", tmp_path / "run", symlinks=True)
    expected = json.loads((COMPAT / version / "fingerprints.json").read_text())[str(step)]
    loaded = trainfold.load(tmp_path / "run", like=TrainState(trainer=Progress()), step=step)
    assert fingerprint(loaded) == expected
    manifest = read_manifest(LocalStore(tmp_path / "run"), f"step-{step:08d}")
    assert {component.name: component.fingerprint for component in manifest.components} == expected
    assert verify_checkpoint(tmp_path / "run" / f"step-{step:08d}").error is None


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_checkpoint_of_four_ranks_loads_on_one_with_the_bits_it_had(version, tmp_path):
    """R10, X04: rules of cuts, listed slices, pieces, replicas, and streams of each rank, as version 2 first had them."""
    shutil.copytree(COMPAT / version / "ranks" / "run", tmp_path / "run", symlinks=True)
    expected = json.loads((COMPAT / version / "ranks" / "fingerprints.json").read_text())
    loaded = trainfold.load(tmp_path / "run", like=TrainState(trainer=Progress()), components=["model", "trainer"])
    found = content_fingerprint(loaded)
    assert (found["model"], found["trainer"]) == (expected["model"], expected["trainer"])
    manifest = read_manifest(LocalStore(tmp_path / "run"), "step-00000001")
    assert {component.name: component.fingerprint for component in manifest.components} == expected["recorded"]
    assert [node["fields"]["value"]["dict"]["counter"] for node in manifest.component("rng").nodes] == [0, 1, 2, 3]
    answer = verify_checkpoint(tmp_path / "run" / "step-00000001", contents=True)
    assert answer.error is None
    assert answer.data["components"][0]["contents"] == expected["model"]


CUTS = {"rows": [[0]], "columns": [[], [0]], "few": [[0]], "listed": [[], [0]], "tied": [[0]]}


def part_of(value, cuts, collectives):
    """What a rank has of a tensor, without its values."""
    box = make_placement(make_mesh((collectives.world_size,)), cuts).box(tuple(value.shape), (collectives.rank,))
    sizes, starts = tuple(high - low for low, high in box), tuple(low for low, _ in box)
    return make_shard(torch.zeros(sizes, dtype=value.dtype), shape=tuple(value.shape), starts=starts)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_checkpoint_of_three_ranks_of_the_first_version_loads_on_any_number(world_size, tmp_path):
    """R10, X04: rules of cuts, listed slices, ranks that hold nothing, a tie, and streams of each rank."""
    shutil.copytree(COMPAT / "v1" / "ranks" / "run", tmp_path / "run", symlinks=True)
    expected = json.loads((COMPAT / "v1" / "ranks" / "fingerprints.json").read_text())
    manifest = read_manifest(LocalStore(tmp_path / "run"), "step-00000001")
    assert {component.name: component.fingerprint for component in manifest.components} == expected["recorded"]
    whole = trainfold.load(
        tmp_path / "run", like=TrainState(trainer=Progress()), components=["model", "trainer", "ema"]
    )
    assert {name: each for name, each in content_fingerprint(whole).items() if name != "rng"} == {
        name: expected[name] for name in ("model", "trainer", "ema")
    }
    answer = verify_checkpoint(tmp_path / "run" / "step-00000001", contents=True)
    assert answer.error is None
    assert answer.data["components"][0]["contents"] == expected["model"]

    def loaded(collectives):
        parts = {
            name: part_of(leaf, CUTS[name], collectives) if name in CUTS else torch.zeros_like(leaf)
            for name, leaf in whole.model.params.items()
        }
        parts["tied"] = parts["rows"]
        like = whole.evolve(model=ModelState(Leaves(parts), whole.model.buffers))
        names = ["model", "trainer", "ema", *(["rng"] if collectives.world_size == 3 else [])]
        like = like.evolve(rng=Opaque({"counter": 9, "bits": torch.zeros(8, dtype=torch.uint8)}))
        state = trainfold.load(tmp_path / "run", like=like, components=names, collectives=collectives)
        for name, leaf in state.model.params.items():
            saved = whole.model.params[name]
            mine = saved[tuple(slice(*side) for side in leaf.box)] if isinstance(leaf, Shard) else saved
            assert torch.equal(leaf.tensor if isinstance(leaf, Shard) else leaf, mine), name
        return state.rng.value["counter"]

    assert run_threads(world_size, loaded) == ([0, 1, 2] if world_size == 3 else [9] * world_size)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
def test_training_goes_on_from_an_old_checkpoint(tmp_path):
    """R10, V13: today's step continues training from a state of the first version."""
    shutil.copytree(COMPAT / "v1" / "run", tmp_path / "run", symlinks=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.01)
    schedule = trainfold.schedules.wsd(10, warmup_steps=2, decay_steps=3)
    like = trainfold.init_state(
        model, adamw, seed=1, schedule=schedule, dataset=trainfold.data.make_cursor(100, seed=3)
    )
    state = trainfold.load(tmp_path / "run", like=like, contract={"batch_size": 4})
    assert state.extra["tied"]["a"] is state.extra["tied"]["b"]
    assert state.dataset.next_index == 8
    loss = lambda m, b: trainfold.Loss(sum=(m(b) ** 2).sum(), weight=len(b))
    after, _ = trainfold.make_step(model, loss, adamw, schedule=schedule)(state, torch.ones(4, 4))
    assert after.trainer.step == 3


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("step", [2, 4])
def test_a_loop_goes_on_from_an_old_position_with_the_batches_and_losses_it_had(name, step, tmp_path, caplog):
    """R10, G13, V09: inside an epoch and at its end; inside, a warning says that the position has no record of workers."""
    shutil.copytree(COMPAT / "positions" / name / "run", tmp_path / "run", symlinks=True)
    expected = json.loads((COMPAT / "positions" / name / "events.json").read_text())
    torch.manual_seed(77)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kind = StatefulDataLoader if name.endswith("stateful") else DataLoader
    loader = kind(torch.arange(10.0).unsqueeze(1), batch_size=3, shuffle=True)
    live = trainfold.attach(model, optimizer, loader=loader)
    found = []
    with trainfold.CheckpointManager(str(tmp_path / "run"), every=100) as manager:
        manager.restore(live, step=step)
        for batch in live.batches(steps=8):
            loss = (model(batch) + torch.randn(len(batch), 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append([batch.flatten().tolist(), loss.item()])
            live.advance(samples=len(batch))
    assert [batch for batch, _ in found] == [batch for batch, _ in expected[step:]]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected[step:]], rel=1e-5)
    assert ("from an older trainfold" in caplog.text) == (step == 2)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize("version", ["v4", "v5"])
def test_a_checkpoint_of_four_ranks_that_refers_to_another_one_loads_with_the_bits_it_had(version, tmp_path):
    """R10, X04: references of each rank, as version 4 first had them: to whole tensors, to shares of replicas, and to parts; and to files of ranks, of version 5."""
    shutil.copytree(COMPAT / version / "ranks" / "run", tmp_path / "run", symlinks=True)
    expected = json.loads((COMPAT / version / "ranks" / "fingerprints.json").read_text())
    loaded = trainfold.load(tmp_path / "run", like=TrainState(trainer=Progress()), components=["model", "trainer"])
    found = content_fingerprint(loaded)
    assert (found["model"], found["trainer"]) == (expected["model"], expected["trainer"])
    manifest = read_manifest(LocalStore(tmp_path / "run"), "step-00000002")
    assert manifest.summary.refers == ("step-00000001",)
    assert {file.rank for file in manifest.references} == {0, 1, 2, 3}
    assert {component.name: component.fingerprint for component in manifest.components} == expected["recorded"]
    answer = verify_checkpoint(tmp_path / "run" / "step-00000002", contents=True)
    assert answer.error is None
    assert answer.data["components"][0]["contents"] == expected["model"]

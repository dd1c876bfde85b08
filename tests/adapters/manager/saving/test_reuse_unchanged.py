"""`reuse_unchanged`: a manager writes the leaves that have changed, refers to an earlier checkpoint for the others, and keeps that one."""

from collections import Counter

import pytest
import torch
from torch import nn

import trainfold
from trainfold.backends.hold.held_leaf import HeldLeaf
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.reuse.unchanged import refer_to_unchanged
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.runs.snapshot import describe_state
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import CheckpointDamaged
from trainfold.core.save.reuse.base import base_from
from trainfold.core.save.save_plan import plan_save

MIB = 2**20
MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def attached():
    """A frozen weight of 2 MiB beside one of 1.2 MiB that is trained; only the last element of this one changes its sum."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(1024, 512, bias=False), "head": nn.Linear(600, 512, bias=False)})
    model["base"].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    return trainfold.attach(model, optimizer), model, optimizer


def train(live, model, optimizer):
    model["head"](torch.ones(1, 600)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    live.advance(samples=1)


def saves(run, steps, mode="sync", **options):
    """Train from where the run is, and save after each step; return the bytes of each save, and the fingerprints in the end."""
    live, model, optimizer = attached()
    with trainfold.CheckpointManager(run, every=1, mode=mode, reuse_unchanged=True, **options) as manager:
        manager.restore(live)
        sizes = []
        for _ in range(steps):
            train(live, model, optimizer)
            outcome = manager.save(live)
            sizes.append((outcome.result or manager.drain()).size_bytes)
    return sizes, trainfold.fingerprint(live.capture())


def files(run):
    return sorted(path.parent.name for path in run.glob("step-*/model-*"))


@MODES
def test_a_frozen_base_is_written_once_also_after_a_restart(mode, tmp_path):
    """B16, X15: of a run with a frozen base only what is trained is written; a restart takes the manifest of what it restores."""
    first, _ = saves(tmp_path / "run", 2, mode, keep_last=1)
    second, now = saves(tmp_path / "run", 2, mode, keep_last=1)
    whole, *rest = first + second
    assert whole > 3 * MIB
    assert all(size < 1.3 * MIB for size in rest)
    assert files(tmp_path / "run") == ["step-00000001", "step-00000004"]
    manifest = read_manifest(LocalStore(tmp_path / "run"), "step-00000004")
    assert manifest.summary.refers == ("step-00000001",)  # never a chain
    found = trainfold.load(tmp_path / "run", like=attached()[0].capture())
    assert {k: v for k, v in trainfold.fingerprint(found).items() if k != "rng"} == {k: v for k, v in now.items() if k != "rng"}  # fmt: skip


def test_by_default_every_checkpoint_stands_alone(tmp_path):
    live, model, optimizer = attached()
    with trainfold.CheckpointManager(tmp_path / "run", every=1) as manager:
        for _ in range(2):
            train(live, model, optimizer)
            assert manager.save(live).result.size_bytes > 3 * MIB


def test_an_unchanged_leaf_is_read_once_and_a_changed_one_a_piece_more(tmp_path, monkeypatch):
    """The look at a leaf ends with the first piece that differs; a leaf that is equal to its end is not read again to be written."""
    looked, taken = Counter(), Counter()
    peek, pieces = HeldLeaf.peek, HeldLeaf.pieces

    def counting_peek(leaf, start, memory):
        looked[leaf.name] += len(memory)
        return peek(leaf, start, memory)

    def counting_pieces(leaf, *arguments, **options):
        for piece in pieces(leaf, *arguments, **options):
            taken[leaf.name] += len(piece)
            yield piece

    saves(tmp_path / "run", 1)
    monkeypatch.setattr(HeldLeaf, "peek", counting_peek)
    monkeypatch.setattr(HeldLeaf, "pieces", counting_pieces)
    saves(tmp_path / "run", 1, "async")
    base, head = (("model", f"model.params['{name}.weight']") for name in ("base", "head"))
    assert (looked[base], taken[base]) == (2 * MIB, 0)
    assert (looked[head], taken[head]) == (MIB, 600 * 512 * 4)


def test_a_leaf_that_changes_back_is_written_again():
    """Only the checkpoint before is compared with, and what it refers to."""
    store = trainfold.stores.MemoryStore()
    state = trainfold.TrainState(trainer=trainfold.Progress(step=1), extra={"ema": {"w": torch.zeros(10_000)}})
    with trainfold.CheckpointManager(store, reuse_unchanged=True) as manager:
        for step, value in enumerate((0.0, 1.0, 0.0, 0.0), 1):
            at = state.evolve(trainer=trainfold.Progress(step=step), extra={"ema": {"w": torch.full((10_000,), value)}})
            manager.save(at)
    refers = [read_manifest(store, f"step-{step:08d}").summary.refers for step in range(1, 5)]
    assert refers == [(), (), (), ("step-00000003",)]


def test_the_plan_says_what_is_not_written(tmp_path):
    saves(tmp_path / "run", 2)
    text = str(_plan(tmp_path))
    assert "step-00000001/model-00000-of-00001.safetensors" in text
    assert "2,097,152 bytes, not written again" in text


def _plan(tmp_path):
    store = LocalStore(tmp_path / "run")
    base = base_from(read_manifest(store, "step-00000002"), "step-00000002", 0)
    state = trainfold.load(store, like=trainfold.TrainState(trainer=trainfold.Progress()))
    snapshot = describe_state(state.evolve(trainer=trainfold.Progress(step=3)))
    plan = plan_save([snapshot.described], step=3, only=0)
    return refer_to_unchanged(plan, base, snapshot.tensors, store=store, rank=0)


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")
def test_a_checkpoint_whose_referenced_file_is_gone_is_torn_and_an_older_one_is_resumed(tmp_path):
    saves(tmp_path / "run", 3)
    saved = tmp_path / "run" / "step-00000001" / "model-00000-of-00001.safetensors"
    data = saved.read_bytes()
    saved.unlink()
    like = attached()[0].capture()
    with pytest.raises(
        trainfold.ResumeRefused, match=r"step-00000001/model-00000-of-00001\.safetensors.*a later checkpoint refers to"
    ):
        trainfold.load(tmp_path / "run", like=like, step=3)
    saved.write_bytes(data)
    own = tmp_path / "run" / "step-00000003" / "model-00000-of-00001.safetensors"
    own.unlink()
    assert trainfold.load(tmp_path / "run", like=like).trainer.step == 2


def test_rot_in_an_old_file_hurts_each_checkpoint_that_refers_to_it(tmp_path):
    saves(tmp_path / "run", 2)
    saved = tmp_path / "run" / "step-00000001" / "model-00000-of-00001.safetensors"
    data = bytearray(saved.read_bytes())
    data[8192] ^= 1
    saved.write_bytes(data)
    for step in (1, 2):
        with pytest.raises(CheckpointDamaged, match="step-00000001/model"):
            trainfold.load(tmp_path / "run", like=attached()[0].capture(), step=step)


def test_ranks_refer_to_their_own_files_and_restart(tmp_path):
    """Each rank has restored its part, and refers to what it has written itself."""
    state = trainfold.TrainState(
        trainer=trainfold.Progress(step=1), extra={"ema": {"w": torch.arange(200_000.0), "v": torch.zeros(9000)}}
    )

    def life(ranks, step):
        with trainfold.CheckpointManager(tmp_path / "run", reuse_unchanged=True, collectives=ranks) as manager:
            like = state
            if step > 1:
                like = manager.load(state, manager.should_load(state))
            after = like.evolve(
                trainer=trainfold.Progress(step=step),
                extra={"ema": {**like.extra["ema"], "v": torch.full((9000,), float(step))}},
            )
            return manager.save(after).result.size_bytes

    sizes = [run_threads(2, lambda ranks, step=step: life(ranks, step))[0] for step in (1, 2)]
    assert sizes[0] > 800_000 > 60_000 > sizes[1]
    manifest = read_manifest(LocalStore(tmp_path / "run"), "step-00000002")
    assert {file.rank for file in manifest.references} == {0, 1}
    found = trainfold.load(tmp_path / "run", like=state)
    assert torch.equal(found.extra["ema"]["w"], state.extra["ema"]["w"])
    assert found.extra["ema"]["v"][0] == 2


def test_a_config_names_it(tmp_path):
    config = trainfold.managers.CheckpointConfig(run=tmp_path / "run", reuse_unchanged=True)
    with trainfold.managers.create_checkpoint_manager(config) as manager:
        assert manager._saves.base is not None

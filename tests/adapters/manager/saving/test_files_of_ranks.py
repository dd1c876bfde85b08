"""A manager whose store prefers one data file a rank: holds, references, retention and restores work on parts of files."""

import pytest
import torch
from torch import nn

import trainfold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.stores import FilePreference


def attached():
    """A frozen layer beside one that AdamW trains."""
    model = nn.ModuleDict({"base": nn.Linear(100, 60, bias=False), "head": nn.Linear(100, 60)})
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.copy_(torch.arange(each.numel()).view_as(each).mul(0.01).add(number).sin())
    model["base"].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model["head"].parameters(), lr=0.1)
    return trainfold.attach(model, optimizer), model, optimizer


def train(live, model, optimizer):
    model["head"](torch.ones(1, 100)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    live.advance(samples=1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_attached_run_goes_on_from_parts_of_files_also_in_place(mode, tmp_path):
    """Held leaves of all components are written into one file; a frozen layer is referred to; a restore reads parts of files into memory that is there."""
    store = LocalStore(tmp_path / "run", prefers=FilePreference(1))
    live, model, optimizer = attached()
    with trainfold.CheckpointManager(store, every=1, mode=mode, reuse_unchanged=True, keep_last=2) as manager:
        manager.restore(live)
        for _ in range(4):
            train(live, model, optimizer)
            manager.save(live)
    wanted = trainfold.fingerprint(live.capture())
    names = sorted(name for name in store.list() if name.startswith("step-"))
    assert names == [f"step-0000000{step}" for step in (1, 3, 4)]  # the first has the frozen layer
    for name in names:
        manifest = read_manifest(store, name)
        assert manifest.head.schema_version == 5
        assert [file.name for file in manifest.own_files] == ["rank-00000-of-00001.safetensors"]
        assert manifest.own_files[0].components[:2] == ("model", "optimizer")
    for in_place in (False, True):
        live, model, optimizer = attached()
        train(live, model, optimizer)
        with trainfold.CheckpointManager(store) as manager:
            manager.restore(live, in_place=in_place)
        assert trainfold.fingerprint(live.capture()) == wanted


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ranks_load_some_components_of_files_that_have_all(ranks, tmp_path):
    """Whatever number of ranks saved them, and also where they read for each other."""
    store = LocalStore(tmp_path / "run", prefers=FilePreference(1), is_shared=True)
    value = torch.arange(90_000.0)

    def state(step, rank, scale):
        extra = {name: {"w": value * scale * number} for number, name in enumerate(("ema", "other"), 1)}
        return trainfold.TrainState(
            trainer=trainfold.Progress(step=step), rng={"own": torch.tensor([rank])}, extra=extra
        )

    run_threads(ranks, lambda world: trainfold.save(state(3, world.rank, 1.0), store, collectives=world))
    assert len(store.list("step-00000003")) == ranks + (ranks - 1) + 1  # data, indexes, and the root

    def loaded(world):
        like = state(0, world.rank, 0.0)
        found = trainfold.load(
            store, like=like, components=["other", "trainer"], collectives=world, policy={"world": "adapt"}
        )
        return torch.equal(found.extra["other"]["w"], 2 * value) and not found.extra["ema"]["w"].any()

    for others in (1, 3):
        assert run_threads(others, loaded) == [True] * others

"""How a run ends: with a full checkpoint, from which it can go on, and an export beside it, which no resume takes for one."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import trainfold
from trainfold.core.errors import InvalidArgument
from trainfold.transforms import lora, quantised, view
from trainfold.weights import (
    CheckpointWeights,
    Frozen,
    HubDirectory,
    Renamed,
    SeveralSources,
    take_weights,
    write_hub_directory,
)

CONVERTER = lora(alpha=4, a="{layer*}.a", b="{layer*}.b")


class Adapted(nn.Module):
    """A linear layer with a trained difference of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features)),
            nn.Parameter(torch.randn(base.out_features, rank)),
        )

    def forward(self, x):
        return self.base_layer(x) + x @ self.a.T @ self.b.T * 2


def plain(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def adapted(seed):
    model = plain(seed).requires_grad_(False)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return model


class Run:
    def __init__(self, seed, hub):
        self.model = adapted(seed)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        base = Renamed(HubDirectory(hub), CONVERTER.state_dict_adapter)
        self.live = trainfold.attach(self.model, self.optimizer, weights=Frozen(base))

    def train(self, manager, steps):
        while self.live.progress.step < steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.live.progress.step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.live.advance(samples=8)
            manager.step(self.live)


@pytest.fixture
def hub(tmp_path):
    path = tmp_path / "hub"
    path.mkdir()
    save_file({name: each.detach().clone() for name, each in plain(7).state_dict().items()}, path / "model.safetensors")
    return path


def test_a_run_ends_with_a_full_checkpoint_and_an_export_that_no_resume_takes_for_one(hub, tmp_path):
    """T20: retention runs at the last save too. T24, K03, K07: the export, also one that is put into the run, is offered to no resume; its weights compute what the adapted model does."""
    run, x = tmp_path / "run", torch.randn(3, 4)
    first = Run(1, hub)
    with trainfold.CheckpointManager(run, every=1, keep_last=2) as manager:
        manager.restore(first.live)
        first.train(manager, 5)
        manager.finish(first.live)
        while_it_trains = tmp_path / "live"
        write_hub_directory(first.live.capture(), while_it_trains, rules=view(CONVERTER, "export"))
    steps = sorted(each.name for each in run.iterdir() if each.name.startswith("step-"))
    assert steps == ["step-00000004", "step-00000005"]
    both = SeveralSources([HubDirectory(hub), CheckpointWeights(run)])
    with pytest.raises(InvalidArgument, match="a directory that is not in a checkpoint"):
        write_hub_directory(both, run / "step-00000005" / "export", rules=view(CONVERTER, "export"))
    for path in (tmp_path / "offline", run / "export"):
        write_hub_directory(both, path, rules=view(CONVERTER, "export"))
        exported = load_file(path / "model.safetensors")
        assert exported.keys() == plain(0).state_dict().keys()
        assert exported.keys() == load_file(while_it_trains / "model.safetensors").keys()
        assert all(
            torch.equal(each, load_file(while_it_trains / "model.safetensors")[n]) for n, each in exported.items()
        )
        model = plain(0)
        model.load_state_dict(exported)
        torch.testing.assert_close(model(x), first.model(x))
    again = Run(2, hub)
    with trainfold.CheckpointManager(run, every=1, keep_last=2) as manager:
        assert manager.restore(again.live).step == 5
    assert torch.equal(again.model[0].a, first.model[0].a)
    assert torch.equal(
        again.optimizer.state_dict()["state"][0]["exp_avg"], first.optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_an_export_of_adapters_without_their_base_is_refused_before_a_file_is_written(hub, tmp_path):
    """K09."""
    first = Run(1, hub)
    with trainfold.CheckpointManager(tmp_path / "run", every=1) as manager:
        manager.restore(first.live)
        first.train(manager, 1)
    with pytest.raises(trainfold.errors.InvalidState, match="export the base together with its adapters"):
        write_hub_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "out", rules=view(CONVERTER, "export"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidArgument, match="sources that list what they have"):
        SeveralSources([Renamed(HubDirectory(hub), str)]).specs()


def test_a_full_checkpoint_is_never_cast(tmp_path):
    """K04: what an export rounds is as it was in the checkpoint beside it."""
    model = plain(3)
    live = trainfold.attach(model)
    with trainfold.CheckpointManager(tmp_path / "run") as manager:
        manager.restore(live)
        live.advance(samples=1)
        manager.finish(live)
    write_hub_directory(CheckpointWeights(tmp_path / "run"), tmp_path / "half", dtype="bfloat16")
    assert {each.dtype for each in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    found = take_weights(trainfold.attach(plain(4)).capture(), CheckpointWeights(tmp_path / "run"))
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in found.model.params.items())


@pytest.mark.parametrize("payload", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_keep_their_bits_in_checkpoints_and_are_multiplied_in_an_export(payload, tmp_path):
    """K04, K06: a cast of an export leaves payloads as they are, and a run begins with them bit for bit (V16: with their scales)."""

    class Quantised(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.register_buffer("weight", (torch.arange(6).reshape(2, 3) + fill).to(payload))
            self.register_buffer("weight_scale", torch.tensor([0.5, 2.0]))
            self.bias = nn.Parameter(torch.ones(2))

    run, model = tmp_path / "run", Quantised(1)
    with trainfold.CheckpointManager(run) as manager:
        live = trainfold.attach(model)
        manager.restore(live)
        live.advance(samples=1)
        manager.finish(live)
    again = Quantised(0)
    with trainfold.CheckpointManager(tmp_path / "again") as manager:
        manager.restore(trainfold.attach(again), initial=CheckpointWeights(run))
    assert again.weight.dtype == payload
    assert torch.equal(again.weight.float(), model.weight.float())
    scales = quantised("weight", "weight_scale", block=(1, None), dtype="float32")
    write_hub_directory(CheckpointWeights(run), tmp_path / "out", rules=view(scales, "export"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["weight"], model.weight.float() * torch.tensor([[0.5], [2.0]]))
    write_hub_directory(CheckpointWeights(run), tmp_path / "cast", dtype="bfloat16")
    cast = load_file(tmp_path / "cast" / "model.safetensors")
    assert (cast["weight"].dtype, cast["bias"].dtype) == (payload, torch.bfloat16)

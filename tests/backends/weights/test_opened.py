"""Weights that are open are read into one memory, one after the other, whichever source has them on disk."""

from operator import attrgetter

import pytest
import torch
from kit.backends import dcp_cases as cases

import trainfold
from trainfold.backends.weights.opened import ReusedMemory, opened_weights
from trainfold.core.errors import InvalidState
from trainfold.core.layout.slices import whole_box
from trainfold.properties.contracts import check_weight_source
from trainfold.weights import CheckpointWeights, DcpDirectory, TorchFile, write_dcp_directory, write_hub_directory

TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2).bfloat16(), "c": torch.arange(20.0).view(5, 4).t()}


def in_dcp(folder):
    cases.save(folder, TENSORS)
    return DcpDirectory(folder)


def in_file(folder):
    folder.mkdir()
    torch.save({"model": TENSORS}, folder / "a.pt")
    return TorchFile(folder / "a.pt", prefix="model")


def in_run(folder):
    model = torch.nn.Module()
    for name, each in TENSORS.items():
        model.register_buffer(name, each.contiguous())
    trainfold.save(trainfold.attach(model).capture(), str(folder))
    return CheckpointWeights(folder)


@pytest.mark.parametrize("write", [in_dcp, in_file, in_run])
def test_the_next_tensor_is_read_into_the_memory_of_the_one_before(write, tmp_path):
    """Fresh memory for each tensor took longer than to read it; values are the same."""
    source = write(tmp_path / "a")
    check_weight_source(lambda: source, TENSORS)
    with opened_weights(source) as weights:
        memory, places = ReusedMemory(weights), set()
        for name in ("c", "a", "b", "a"):
            box = whole_box(tuple(TENSORS[name].shape))
            found = memory.read(name, box)
            assert torch.equal(found, TENSORS[name])
            places.add(found.data_ptr())
    assert len(places) == 1


def by_data(tensor):
    tensor.data.mul_(2)


def by_numpy(tensor):
    tensor.detach().numpy()[:] = 2


def by_a_fused_optimizer(tensor):
    tensor.grad = torch.ones_like(tensor)
    torch.optim.AdamW([tensor], lr=1.0, fused=True).step()


def to_hub(path, state):
    write_hub_directory(state, path)


def to_dcp(path, state):
    write_dcp_directory(path, state)


PARAMETER, BUFFER, SLOT = "model.1.weight", "model.1.running_mean", "optimizer.state.1.exp_avg"


@pytest.mark.parametrize(
    ("export", "name", "write"),
    [
        (to_hub, PARAMETER, by_data),
        (to_hub, PARAMETER, by_a_fused_optimizer),
        (to_hub, BUFFER, by_numpy),
        (to_dcp, PARAMETER, by_data),
        (to_dcp, PARAMETER, by_a_fused_optimizer),
        (to_dcp, BUFFER, by_numpy),
        (to_dcp, SLOT, by_numpy),
    ],
)
def test_a_state_that_is_written_to_around_torch_is_not_exported(export, name, write, tmp_path, monkeypatch):
    """D11: these writes move no version counter; what is published is of one moment, or nothing is."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).pow(2).sum().backward()
    optimizer.step()
    tensor = (
        optimizer.state[model[1].weight]["exp_avg"]
        if name == SLOT
        else attrgetter(name)(torch.nn.ModuleDict({"model": model}))
    )
    state, read, reads = trainfold.attach(model, optimizer).capture(), ReusedMemory.read, []

    def and_write(memory, *part):
        if not reads:
            write(tensor)
        reads.append(part)
        return read(memory, *part)

    monkeypatch.setattr(ReusedMemory, "read", and_write)
    with pytest.raises(InvalidState, match="a write to it while it was read"):
        export(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()

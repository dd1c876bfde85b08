"""Pipelines of real ranks, whose stages are sharded, and programs without a pipeline read each other's directories: model, flat optimizer and step."""

import hashlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.adapters.fsdp2_cases import whole
from kit.backends import dcp_cases as cases
from kit.system.rank_refusals_cases import PATIENT
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainfold.adapters.live.attach import attach
from trainfold.weights import DcpDirectory, dcp_training, take_training, write_dcp_directory

pytestmark = pytest.mark.long
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LAYERS, STEPS = 6, 3


class Model(nn.Module):
    """Layers of 7 rows: over two ranks the parts are uneven."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleDict({str(index): nn.Linear(7, 7) for index in range(LAYERS)})

    def forward(self, x):
        for layer in self.h.values():
            x = layer(x).tanh()
        return x


def program(ranks, stages, *, seed):
    """The stage of a rank, sharded over the ranks that have it too; its optimizer; and what runs a step of the whole model."""
    mesh = init_device_mesh("cpu", (stages, ranks // stages), mesh_dim_names=("pipe", "shard"))
    torch.manual_seed(seed)
    model, index = Model(), mesh.get_local_rank("pipe")
    for name in [name for name in model.h if int(name) * stages // LAYERS != index]:
        del model.h[name]
    if ranks > stages:
        fully_shard(model, mesh=mesh["shard"])
    stage = (
        PipelineStage(model, index, stages, torch.device("cpu"), group=mesh.get_group("pipe")) if stages > 1 else None
    )
    decayed, rest = (
        [value for name, value in model.named_parameters() if ("h.5" in name) is is_rest] for is_rest in (False, True)
    )
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([each for each in groups if each["params"] or stages > 1], lr=0.01)
    schedule = None if stage is None else Schedule1F1B(stage, 3, loss_fn=mean)

    def step(number):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(number))  # each rank has the same
        if schedule is None or stage is None:
            for part in x.chunk(3):
                (mean(model(part), torch.ones(2, 7)) / 3).backward()
        else:
            schedule.step(
                *([x] if stage.is_first else []), target=torch.ones(6, 7) if stage.is_last else None, losses=[]
            )
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, stage, step


def mean(output, target):
    return (output - target).square().mean()


def bits(model, optimizer):
    """Name -> digest of a tensor or a slot, whole, of the stage of a rank."""
    found = {}
    for name, value in model.named_parameters():
        for slot, each in {"": value, **optimizer.state.get(value, {})}.items():
            data = whole(each.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{name} {slot}"] = hashlib.sha1(data).hexdigest()[:16]
        (group,) = (each for each in optimizer.param_groups if any(value is other for other in each["params"]))
        found[f"{name} settings"] = [group["lr"], group["weight_decay"]]
    return found


def state_of(model, optimizer, step):
    """What a program in the manner of torchtitan saves; torch makes no flat state of groups without parameters."""
    empty = [each for each in optimizer.param_groups if not each["params"]]
    optimizer.param_groups = [each for each in optimizer.param_groups if each["params"]]
    names, slots = get_state_dict(model, optimizer, options=FLAT)
    optimizer.param_groups += empty
    return {**names, "optimizer": slots, "train_state": {"step": torch.tensor(step)}}


def theirs(collectives, folder, stages):
    model, optimizer, _, step = program(collectives.world_size, stages, seed=0)
    for number in range(STEPS):
        step(number)
    dcp.save(state_of(model, optimizer, STEPS), checkpoint_id=folder)
    return bits(model, optimizer)


def taken_and_written(collectives, folder, stages, target):
    """A run of this library that goes on from it; and what it writes."""
    model, optimizer, stage, step = program(collectives.world_size, stages, seed=9)
    step(0)
    live = attach(model if stage is None else stage, optimizer)
    training = dcp_training(folder, model="", optimizer="optimizer", step="train_state.step")
    live.restore(take_training(live.capture(), training, collectives=collectives), collectives=collectives)
    assert live.progress.step == STEPS
    write_dcp_directory(
        target, live.capture(), model="", optimizer="optimizer", flatten_optimizer_state_dict=True, collectives=collectives,
        objects={"train_state": {"step": torch.tensor(STEPS)}},
    )  # fmt: skip
    found = bits(model, optimizer)
    step(STEPS)
    return found, bits(model, optimizer)


def loaded(collectives, folder, stages):
    """A program of torch that loads it and goes on."""
    model, optimizer, _, step = program(collectives.world_size, stages, seed=9)
    step(0)
    state = state_of(model, optimizer, -1)
    dcp.load(state, checkpoint_id=folder)
    assert int(state["train_state"]["step"]) == STEPS
    optimizer.param_groups = [each for each in optimizer.param_groups if each["params"]]
    names = {name: each for name, each in state.items() if name not in ("optimizer", "train_state")}
    set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=state["optimizer"], options=FLAT)
    found = bits(model, optimizer)
    step(STEPS)
    return found, bits(model, optimizer)


def union(each_rank):
    found = {}
    for each in each_rank:
        for name, value in each.items():
            assert found.setdefault(name, value) == value
    return found


WORLDS = [(1, 1), (2, 2), (2, 1), (4, 2), (3, 3)]
"""Ranks and stages: one process, a pipeline, FSDP2, a pipeline whose stages are sharded, and another number of stages."""


@pytest.mark.parametrize("saved", [(2, 2), (4, 2), (2, 1)])
def test_a_pipeline_goes_on_from_torch_and_torch_from_a_pipeline_whatever_the_ranks(saved, processes, tmp_path):
    """M24, I05: what torch has saved is taken on other ranks and stages, and what these write has the tensors and settings that torch's load finds on others again, bit for bit; and so has the next step."""
    first = str(tmp_path / "theirs")
    wanted = union(processes.run(saved[0], theirs, first, saved[1], collectives=PATIENT))
    tensors = cases.all_bits(cases.everything(DcpDirectory(first)))
    nexts = {}
    for ranks, stages in WORLDS:
        folder = str(tmp_path / f"ours-{ranks}-{stages}")
        ended = processes.run(ranks, taken_and_written, first, stages, folder, collectives=PATIENT)
        assert union(each[0] for each in ended) == wanted
        nexts[ranks, stages] = union(each[1] for each in ended)
        assert cases.all_bits(cases.everything(DcpDirectory(folder))) == tensors
        assert DcpDirectory(folder).metadata.paths == DcpDirectory(first).metadata.paths | {"step": ("step",)}
    for (ranks, stages), before in zip(WORLDS, [*WORLDS[1:], WORLDS[0]], strict=True):
        folder = str(tmp_path / f"ours-{before[0]}-{before[1]}")
        ended = processes.run(ranks, loaded, folder, stages, collectives=PATIENT)
        assert union(each[0] for each in ended) == wanted
        assert union(each[1] for each in ended) == nexts[ranks, stages]

"""Stages of `torch.distributed.pipelining` on two processes: the loss, the norm and the weight of the whole pipeline, for each schedule."""

import os
import subprocess

import pytest
from kit.free_port import free_port

pytestmark = pytest.mark.slow(2)

PROGRAM = """
import sys
import torch, torch.distributed as dist, trainfold
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
LAYERS = 8

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleDict({str(index): nn.Linear(4, 4) for index in range(LAYERS)})

    def forward(self, x):
        for layer in self.h.values():
            x = layer(x).tanh()
        return x

def cut(index, count):
    model = Model()
    for name in [name for name in model.h if int(name) * count // LAYERS != index]:
        del model.h[name]
    return model

def mean(output, target):
    return (output - target).square().mean()

def total(output, target):
    return (output - target).square().sum()

x, target = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.ones(8, 4)
for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    for loss_fn in (mean, total):
        whole = Model()
        for part, goal in zip(x.chunk(4), target.chunk(4)):
            (mean(whole(part), goal) / 4).backward()
        count = ranks * (2 if "Interleaved" in kind.__name__ else 1)
        stages = [PipelineStage(cut(index, count), index, count, torch.device("cpu")) for index in range(rank, count, ranks)]
        schedule = kind(stages if count > ranks else stages[0], 4, loss_fn=loss_fn, scale_grads=loss_fn is mean)
        parameters = [each for stage in stages for each in stage.submod.parameters()]
        live = trainfold.attach(stages, torch.optim.SGD(parameters, lr=0.1))
        losses = []
        first, last = rank == 0, rank == ranks - 1
        schedule.step(*([x] if first else []), target=target if last else None, losses=losses)
        loss = (torch.stack(losses).mean() if loss_fn is mean else torch.stack(losses).sum()) if last else None
        weight = None if loss_fn is mean else target.numel()
        expected = torch.nn.utils.get_total_norm([each.grad for each in whole.parameters()])
        found = live.check(loss, weight=weight, clip_norm=float(expected) / 2)
        assert abs(found.loss - float(mean(whole(x), target))) < 1e-6, found
        assert abs(found.grad_norm - float(expected)) < 1e-6, (found, expected)
        if loss_fn is mean:
            assert found.grad_norm == float(expected), (found, expected)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), float(expected) / 2)
        named = dict(whole.named_parameters())
        for stage in stages:
            for name, each in stage.submod.named_parameters():
                torch.testing.assert_close(each.grad, named[name].grad)
        before = [each.detach().clone() for each in parameters]
        try:
            live.check(torch.tensor(float("nan")) if last else None)
        except trainfold.errors.NonFinite as error:
            assert "not finite on ranks [1]" in str(error), error
            assert error.rank == 1, error.rank
            print(kind.__name__, loss_fn.__name__, "stopped", flush=True)
        if not last:
            parameters[0].grad[0] = float("inf")
        try:
            live.check(torch.tensor(1.0) if last else None)
        except trainfold.errors.NonFinite:
            print(kind.__name__, loss_fn.__name__, "stopped by a gradient", flush=True)
        assert all(map(torch.equal, before, parameters))
stage = PipelineStage(cut(rank, ranks), rank, ranks, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=total)  # divides by the microbatches, as if each had a mean
live = trainfold.attach(stage, torch.optim.SGD(stage.submod.parameters(), lr=0.1))
schedule.step(*([x] if stage.is_first else []), target=target if stage.is_last else None, losses=[])
try:
    live.check(torch.tensor(1.0) if stage.is_last else None, weight=32)
except trainfold.errors.InvalidArgument as error:
    print(error, flush=True)
if stage.is_last:
    stage.submod.zero_grad()
try:
    live.check(torch.tensor(1.0) if stage.is_last else None)
except trainfold.errors.RanksDisagree as error:
    print(error, flush=True)

class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.h = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        x = self.emb(x)
        for layer in self.h:
            x = layer(x).tanh()
        return x

pipe = pipeline(Split(), mb_args=(x[:2],), split_spec={"h.2": SplitPoint.BEGINNING})
live = trainfold.attach(pipe.build_stage(rank, torch.device("cpu")))
print(sorted(live.capture().model.params), flush=True)
assert not any(key.startswith("attached.model.h") for key in live.contract())
dist.destroy_process_group()
"""


NORMS = """
import torch, torch.distributed as dist, trainfold
from torch import nn
from torch.distributed.pipelining import PipelineStage

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
DATA = torch.Generator().manual_seed(7)
GRADIENTS = {name: torch.randn(5, 3, generator=DATA) for name in ("emb.weight", "h.0.weight", "h.1.weight", "h.2.weight", "h.3.weight", "late.weight")}

def part(*names, dtypes={}):
    found = nn.ModuleDict()
    for name in names:
        *path, last, _ = name.split(".")
        place = found
        for key in path:
            place[key] = place[key] if key in place else nn.ModuleDict()
            place = place[key]
        place[last] = nn.Linear(3, 5, bias=False, dtype=dtypes.get(name))
    for name, each in found.named_parameters():
        each.grad = GRADIENTS[name].to(each.dtype, copy=True)
    return found

def check(title, modules, order, dtypes={}):
    whole = part(*order, dtypes=dtypes)
    expected = torch.nn.utils.get_total_norm([each.grad for each in whole.parameters()])
    mine = range(rank, len(modules), ranks) if title != "one object" else [(0, 3), (1, 2)][rank]
    stages = [PipelineStage(modules[index], index, len(modules), torch.device("cpu")) for index in mine]
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    live = trainfold.attach(stages, torch.optim.SGD(list(dict.fromkeys(parameters)), lr=0.1))
    has_last = len(modules) - 1 in mine
    loss = torch.tensor(1.0) if has_last else None
    found = live.check(loss, clip_norm=float(expected) / 2)
    assert found.grad_norm == float(expected), (title, found, expected)
    nn.utils.clip_grad_norm_(whole.parameters(), float(expected) / 2)
    named = dict(whole.named_parameters())
    for stage in stages:
        for name, each in stage.submod.named_parameters():
            assert torch.equal(each.grad, named[name].grad), (title, name)
    print(title, "as the whole", flush=True)
    return live, stages, loss

tied = ["emb.weight", "h.0.weight"], ["h.1.weight", "emb.weight", "late.weight"]
live, stages, loss = check("tied", [part(*names) for names in tied], ["emb.weight", "h.0.weight", "h.1.weight", "late.weight"])

# the parameters that have a gradient change: the copy that counts is the first one with a gradient
whole = part("h.0.weight", "h.1.weight", "emb.weight", "late.weight")
for module in (whole, *(stage.submod for stage in stages)):
    for name, each in module.named_parameters():
        each.grad = None if rank == 0 and name == "emb.weight" and module is not whole else GRADIENTS[name].clone()
expected = torch.nn.utils.get_total_norm([each.grad for each in whole.parameters()])
found = live.check(loss)
assert found.grad_norm == float(expected), (found, expected)
print("unfrozen as the whole", flush=True)

# a copy that does not count still has to be finite
for stage in stages:
    for name, each in stage.submod.named_parameters():
        each.grad = GRADIENTS[name] * (float("nan") if rank == 1 and name == "emb.weight" else 1)
try:
    live.check(loss)
except trainfold.errors.NonFinite:
    print("stopped by a copy", flush=True)

shared = [part(*names) for names in (["emb.weight", "h.0.weight"], ["h.1.weight"], ["h.2.weight"], ["h.3.weight", "emb.weight"])]
shared[3]["emb"] = shared[0]["emb"]
check("one object", shared, ["emb.weight", "h.0.weight", "h.1.weight", "h.2.weight", "h.3.weight"])

low = {"h.0.weight": torch.bfloat16, "h.1.weight": torch.bfloat16}
halves = ["h.0.weight", "h.1.weight"], ["h.2.weight", "h.3.weight"]
check("mixed", [part(*names, dtypes=low) for names in halves], ["h.0.weight", "h.1.weight", "h.2.weight", "h.3.weight"], low)
low = dict.fromkeys(halves[1], torch.float16) | low
check("low", [part(*names, dtypes=low) for names in halves], ["h.0.weight", "h.1.weight", "h.2.weight", "h.3.weight"], low)
dist.destroy_process_group()
"""


def test_losses_norms_and_weights_are_those_of_the_whole_model(warm_python, tmp_path):
    """A09, R09: a loss that is not finite on the last stage stops all, and its rank is named; A06: the weight divides once; clipping is by the norm over all stages."""
    outputs = run(PROGRAM, warm_python, tmp_path)
    assert all("pass scale_grads=False to the schedule" in output for output in outputs), outputs
    bare = "live.check of stage 1 of 2: expected gradients, as on other stages, found none"
    assert all(bare in output for output in outputs), outputs
    assert [f"h.{index}.weight" in outputs[0] for index in range(4)] == [True, True, False, False]
    assert [f"h.{index}.weight" in outputs[1] for index in range(4)] == [False, False, True, True]
    for output in outputs:
        assert output.count("stopped\n") == output.count("stopped by a gradient\n") == 8, output


def test_a_shared_weight_counts_once_and_all_stages_round_the_norm_alike(warm_python, tmp_path):
    """A09, W24: the norm of stages that share a weight, or have other dtypes, is that of the whole model, and so are clipped gradients."""
    for output in run(NORMS, warm_python, tmp_path):
        for title in ("tied", "unfrozen", "one object", "mixed", "low"):
            assert f"{title} as the whole" in output, output
        assert "stopped by a copy" in output, output


CUT = """
import torch, torch.distributed as dist, trainfold
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import distribute_tensor

class Part(nn.ModuleDict):
    def forward(self, x):
        return x

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shares"))
index = mesh["stages"].get_local_rank()
gradients = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
module = Part({name: nn.Linear(4, 4, bias=False) for name in (("0", "1"), ("2", "0", "3"))[index]})
fully_shard(module, mesh=mesh["shares"])
for name, each in module.named_parameters():
    each.grad = distribute_tensor(gradients[int(name[0])], mesh["shares"], each.placements)
stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["stages"].get_group())
live = trainfold.attach(stage, torch.optim.SGD(module.parameters(), lr=0.1))
loss = torch.tensor(1.0) if index else None
found, expected = live.check(loss).grad_norm, float(torch.stack([each.norm() for each in gradients]).norm())
assert abs(found - expected) < 1e-5, (found, expected)
if index:
    module["0"].weight.grad.to_local().fill_(float("inf"))
try:
    live.check(loss)
except trainfold.errors.NonFinite:
    print("stopped by a copy", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_shared_weight_that_is_cut_counts_once(warm_python, tmp_path):
    """A09: stages under ``fully_shard``."""
    outputs = run(CUT, warm_python, tmp_path, ranks=4)
    assert all("stopped by a copy" in output for output in outputs), outputs


def run(text, warm_python, tmp_path, *, ranks=2):
    """The outputs of the processes that run a program."""
    program = tmp_path / "program.py"
    program.write_text(text)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            warm_python.command(program), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [each.communicate(timeout=240)[0] for each in started]
    assert [each.returncode for each in started] == [0] * ranks, outputs
    return outputs

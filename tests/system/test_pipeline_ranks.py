"""Stages of `torch.distributed.pipelining` on two processes: the loss, the norm and the weight of the whole pipeline, for each schedule."""

import os
import socket
import subprocess

import pytest

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
        except trainfold.errors.NonFinite:
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


def test_losses_norms_and_weights_are_those_of_the_whole_model(warm_python, tmp_path):
    """A09: a loss that is not finite on the last stage stops all; A06: the weight divides once; clipping is by the norm over all stages."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            warm_python.command(program), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [each.communicate(timeout=240)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], outputs
    assert all("pass scale_grads=False to the schedule" in output for output in outputs), outputs
    bare = "live.check of stage 1 of 2: expected gradients, as on other stages, found none"
    assert all(bare in output for output in outputs), outputs
    assert [f"h.{index}.weight" in outputs[0] for index in range(4)] == [True, True, False, False]
    assert [f"h.{index}.weight" in outputs[1] for index in range(4)] == [False, False, True, True]
    for output in outputs:
        assert output.count("stopped\n") == output.count("stopped by a gradient\n") == 8, output

"""Buffers that DistributedDataParallel broadcasts are saved as those of rank 0, or refused where none broadcasts them."""

import contextlib
import os
import signal

import pytest
import torch
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.format.fingerprint import fingerprint

pytestmark = pytest.mark.slow(1.5)


def train_statistics(collectives, folder, mode, *, leave_at=None, die_at=None):
    """Each rank has its own data and so its own batch statistics; DDP sends rank 0's before each forward. Accumulates over two batches."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 3))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True, seed=3))
    live = attach(model, optimizer, loader=loader)
    compared = []
    with CheckpointManager(f"{folder}/{mode}", every=2, mode=mode, collectives=collectives) as manager:
        manager.restore(live)
        for number, (x,) in enumerate(live.batches(epochs=3)):
            with contextlib.nullcontext() if number % 2 else model.no_sync():
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            live.advance(steps=number % 2)
            manager.step(live)
            compared.append(len(set(collectives.gather(inner[1].running_mean[0].item()))))
            if live.progress.step == leave_at:
                return None
            if live.progress.step == die_at:
                manager.drain()
                os.kill(os.getpid(), signal.SIGKILL)
        manager.finish(live)
    return fingerprint(live.capture().evolve(rng=None)), max(compared)


def train_and_die(collectives, folder):
    train_statistics(collectives, folder, "sync", leave_at=5)
    train_statistics(collectives, folder, "async", die_at=5)


def resume_both(collectives, parts, whole):
    return [[train_statistics(collectives, folder, mode) for folder in (parts, whole)] for mode in ("sync", "async")]


def test_batch_statistics_that_ddp_sends_are_saved_as_those_of_rank_0_and_resumed_exactly(processes, tmp_path):
    """W24: two real ranks are killed after a save, and then each ends with the bits of a run that was not killed."""
    parts, whole = str(tmp_path / "parts"), str(tmp_path / "whole")
    ended = processes.outcomes(2, train_and_die, parts, collectives=PATIENT)
    assert [rank.code for rank in ended] == [-signal.SIGKILL] * 2
    for modes in processes.run(2, resume_both, parts, whole, collectives=PATIENT):
        for (resumed, _), (uninterrupted, differing) in modes:
            assert resumed == uninterrupted
            assert differing == 2, "the statistics of the two ranks differ between the forwards"


def statistics_that_nobody_sends(collectives, folder):
    """Everything that makes it uncertain whether all ranks have rank 0's statistics."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    errors = {}

    def saved(name, model, wrapped=None, after=None, around=contextlib.nullcontext):
        live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        wrapped = model if wrapped is None else wrapped
        with around():
            wrapped(torch.randn(8, 4, generator=torch.Generator().manual_seed(collectives.rank))).sum().backward()
            if after is not None:
                after(wrapped)
            live.advance(samples=1)
            with CheckpointManager(f"{folder}/{name}", collectives=collectives) as manager:
                errors[name] = refusal(lambda: manager.save(live))

    def ddp(**options):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
        inner.register_buffer("of_all", torch.zeros(40))
        return nn.parallel.DistributedDataParallel(inner, **options)

    saved("sent", ddp())
    # a copy of the wrapper: its buffers are never synchronized
    model = ddp()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer, extra={"ema": average})
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(collectives.rank))).sum().backward()
    optimizer.step()
    average.update_parameters(model)
    live.advance(samples=1)
    with CheckpointManager(f"{folder}/average", collectives=collectives) as manager:
        errors["average"] = refusal(lambda: manager.save(live))
    hooked = ddp()
    state = PowerSGDState(None)
    hooked.register_comm_hook(state, powerSGD_hook)
    errors["hook"] = refusal(lambda: attach(hooked))
    for state in (None, torch.distributed.group.WORLD):  # as torch's documentation registers it
        plain = ddp()
        plain.register_comm_hook(state, fp16_compress_hook)
        errors.setdefault("plain hook", []).append(refusal(lambda plain=plain: attach(plain)))
    saved("off", ddp(broadcast_buffers=False))
    model = ddp()
    saved("inner", model.module, wrapped=model)
    ignored = ddp()
    ignored.parameters_to_ignore.add("1.running_mean")
    saved("ignored", ignored)

    def without_sync(model):
        with model.no_sync():
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(7 + collectives.rank))).sum().backward()

    saved("not next", ddp(), after=without_sync)
    joined = ddp()
    saved("joined", joined, around=joined.join)
    by_hook = ddp()
    by_hook._register_buffer_comm_hook(None, lambda *_: None)
    saved("by hook", by_hook)
    halves = [torch.distributed.new_group([rank]) for rank in range(2)]
    saved("other group", ddp(process_group=halves[collectives.rank]))
    return errors


def test_batch_statistics_that_nobody_sends_are_refused(processes, tmp_path):
    """W24: broadcast_buffers is off, the wrapper is not attached, it leaves the buffer out, or it does not send before the next forward.

    Inside of `join` another rank may be the one that sends, and a hook of the user's may do anything.
    """
    for errors in processes.run(2, statistics_that_nobody_sends, str(tmp_path), collectives=PATIENT):
        assert errors.pop("sent") == "nothing"
        assert errors.pop("plain hook") == ["nothing"] * 2
        assert "PowerSGDState" in errors.pop("hook")
        average = errors.pop("average")
        assert average.startswith("RanksDisagree: ema.buffers[")
        assert "for buffer in ema.buffers()" in average
        assert len(errors) == 7
        for name, text in errors.items():
            assert text.startswith("RanksDisagree: model.buffers['1.running_mean']"), (name, text)
            assert "broadcast_buffers" in text

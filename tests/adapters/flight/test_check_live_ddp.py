"""Checked steps under DistributedDataParallel: what it carries from one forward to the next, and its first backward in a process, which sums in another order than the next one from three ranks on."""

import contextlib
import itertools
import logging

import pytest
import torch
from kit.adapters.fsdp2_cases import bits
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold import TorchCollectives
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.errors import StepNotRepeated
from trainfold.states import check_live_steps


class Branching(nn.Module):
    """A norm with statistics, and two branches, of which a batch may use both, one or none."""

    def __init__(self):
        super().__init__()
        self.norm, self.left, self.right, self.head = (
            nn.BatchNorm1d(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 1),
        )

    def forward(self, x, branches):
        x = self.norm(x)
        return self.head(sum((getattr(self, each)(x) for each in branches), x))


def windows(rank, attached, options, *, is_checked):
    """The bits of parameters and buffers after each batch of four windows, of which each batch is a call; the branches differ from batch to batch."""
    torch.manual_seed(0)
    inner = Branching()
    wrapper = nn.parallel.DistributedDataParallel(inner, **options)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1)
    live = attach({"wrapper": wrapper, "parent": nn.Sequential(wrapper), "inner": inner}[attached], optimizer)

    def step(x, branches, *, is_last):
        with contextlib.nullcontext() if is_last else wrapper.no_sync():
            wrapper(x, branches).square().sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=live.progress.step % 2 == 0)

    checked = check_live_steps(live, step, every=1, collectives=TorchCollectives()) if is_checked else step
    found = []
    finds, is_static = options["find_unused_parameters"], options["static_graph"]
    for number in range(12):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + number))
        one = ["left"], ["right"], [], ["left", "right"]
        is_last = number % 3 == 2 or (
            is_static and number < 6
        )  # no_sync before the first sum of a static graph is an error of torch
        checked(x, one[(number + rank * (number > 5)) % 4] if finds and not is_static else one[3], is_last=is_last)
        live.advance(steps=int(number % 3 == 2))
        found.append([each.detach().clone() for each in (*inner.parameters(), *inner.buffers())])
    return found


def all_windows(collectives, attached):
    torch.set_num_threads(1)
    names = "find_unused_parameters", "static_graph", "broadcast_buffers", "gradient_as_bucket_view"
    for values in itertools.product((False, True), repeat=4):
        options = dict(zip(names, values, strict=True))
        plain, checked = (windows(collectives.rank, attached, options, is_checked=each) for each in (False, True))
        assert all(map(torch.equal, itertools.chain(*plain), itertools.chain(*checked))), options


@pytest.mark.slow(4)
@pytest.mark.parametrize("attached", ["wrapper", pytest.param("parent", marks=pytest.mark.long), pytest.param("inner", marks=pytest.mark.long)])  # fmt: skip
def test_windows_checked_batch_by_batch_have_the_bits_of_unchecked_ones(processes, attached):
    """A healthy run ended at its first check: whether the next forward broadcasts buffers, and which parameters a window has used, were those of the first run."""
    processes.run(2, all_windows, attached, collectives=PATIENT)


class Crossed(nn.Module):
    """Its layers are used in another order than they are registered in."""

    def __init__(self):
        super().__init__()
        self.last, self.second, self.first = nn.Linear(200, 1), nn.Linear(200, 200), nn.Linear(8, 200)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def checked(collectives, folder, *, every, steps, spoilt=None):
    """The bits after each step, and the steps that were said not to be checked; goes on from the last checkpoint."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Crossed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    live, said, calls = attach(model, optimizer), [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("trainfold").addHandler(handler)

    def step(x):
        calls.append(1)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if live.progress.step == spoilt:
            model.module.first.bias.grad += len(calls) * (collectives.rank == 1)
        optimizer.step()

    step = step if every is None else check_live_steps(live, step, every=every, collectives=collectives)
    found = []
    with CheckpointManager(folder, every=2, collectives=collectives) as manager:
        manager.restore(live)
        while live.progress.step < steps:
            generator = torch.Generator().manual_seed(10 * live.progress.step + collectives.rank)
            step(torch.randn(4, 8, generator=generator))
            live.advance(samples=4)
            found.append(bits(model, optimizer))
            manager.step(live)
    logging.getLogger("trainfold").removeHandler(handler)
    return found, [text for text in said if "not checked" in text], len(calls)


def loops(collectives, folder):
    plain = checked(collectives, f"{folder}/plain", every=None, steps=4)
    once = checked(collectives, f"{folder}/once", every=1, steps=2)
    again = checked(collectives, f"{folder}/once", every=1, steps=4)
    try:
        checked(collectives, f"{folder}/once", every=1, steps=6, spoilt=4)
    except StepNotRepeated as error:
        return plain, once, again, str(error)
    return plain, once, again, ""


@pytest.mark.slow(4)
@pytest.mark.long
def test_the_first_step_of_a_process_is_not_checked_and_those_after_it_are(processes, tmp_path):
    """A machine that was healthy was taken for one that computes wrongly. A process that resumes has its order from the checkpoint, so its first step is checked."""
    for rank, (plain, once, again, said) in enumerate(processes.run(3, loops, str(tmp_path), collectives=PATIENT)):
        assert once[0] + again[0] == plain[0]
        assert (plain[2], once[2], again[2]) == (4, 3, 4)
        assert (len(once[1]), again[1]) == (rank == 0, [])
        assert "step 5" in said
        assert "on rank 1" in said

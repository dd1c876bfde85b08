"""The tracker that torch makes at the first random operation on a DTensor replaces no stream that was restored."""

import pytest
import torch
from kit.system.rank_refusals_cases import PATIENT
from torch.distributed.tensor import _random

from trainfold.adapters.live.attach import attach
from trainfold.adapters.streams.rng_streams import RngPart


class Tracker:
    """Stands for torch's: its constructor replaces the stream of this rank with that of rank 0, unless the caller says not to."""

    def __init__(self, mesh, run_state_sync=True):
        self.mesh, self.synchronised = mesh, run_state_sync
        if run_state_sync:
            torch.manual_seed(0)


@pytest.mark.parametrize("had_one", [True, False])
def test_a_run_that_had_the_tracker_has_it_again_and_its_own_streams(monkeypatch, had_one):
    """H01: without it the first dropout on a DTensor after a resume would take the numbers of rank 0."""
    monkeypatch.setattr(_random, "OffsetBasedRNGTracker", Tracker)
    monkeypatch.setattr(_random, "_rng_tracker", Tracker("a mesh") if had_one else None)
    torch.manual_seed(3)
    part = RngPart(mesh="a mesh")
    saved = part.capture()
    wanted = torch.rand(2)
    monkeypatch.setattr(_random, "_rng_tracker", None)  # as in a new process
    assert part.problems(saved) == []
    part.write(saved)
    made = _random._rng_tracker
    assert (made is not None) == had_one
    assert made is None or (made.mesh, made.synchronised) == ("a mesh", False)
    assert torch.equal(torch.rand(2), wanted)


def drawn_again(collectives):
    """What DTensors draw after a save, and after a restore in what counts as a new process."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,))
    model = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)).cuda(), mesh, {"0": ColwiseParallel()})
    weight = model[0].weight

    def draw():
        return torch.nn.functional.dropout(weight.detach(), 0.5).to_local().cpu()

    draw()
    torch.cuda.manual_seed(collectives.rank)
    live = attach(model)
    state = live.capture()
    wanted = draw()
    _random._rng_tracker = None
    live.restore(state)
    return torch.equal(draw(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dtensors_on_an_accelerator_draw_after_a_restore_what_they_would_have_drawn(processes):
    """H01: two ranks with streams of their own, which rank 1 keeps."""
    assert processes.run(2, drawn_again, collectives=PATIENT) == [True, True]

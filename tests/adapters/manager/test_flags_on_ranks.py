"""`is_last` and `is_best` on some ranks only, where the others wait in their backward for those that have ended."""

import pytest
import torch
from kit.system.rank_refusals_cases import PATIENT

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager

pytestmark = pytest.mark.slow(4)


def ends_alone(collectives, folder):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    with CheckpointManager(folder, collectives=collectives, every=100) as manager:
        for step in range(1, 5):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=1)
            manager.step(live, is_last=collectives.rank == 2 and step == 2)


def test_a_flag_that_only_one_rank_gives_ends_every_rank_with_an_error_that_names_it(processes, tmp_path):
    """R01, R09: before, the rank waited ten minutes, and the others for as long in their all-reduce."""
    ended = processes.outcomes(3, ends_alone, str(tmp_path), collectives=PATIENT, store="tcp")
    text = "is_last: expected the same on every rank, found True on rank 2, and not on rank 0, 1, which went on"
    assert ended[2].error == "RanksDisagree"
    assert text in ended[2].text
    for other in ended[:2]:  # torch's own error, with a note; or ours, if it came from its all-reduce in time
        assert other.code == 1
        assert text in other.printed, other.printed

"""What a manager says where ranks cannot save together: the closure of LBFGS, and paths that differ."""

import contextlib
import logging

import pytest
import torch

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.core.errors import RanksDisagree, SaveFailed, SaveFailedElsewhere
from trainfold.ranks import Replicas, run_threads


def run_of(ranks, kind=torch.optim.SGD):
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.5)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    live = attach(model, optimizer, parallelism=Replicas(ranks))
    optimizer.zero_grad()
    live.advance(samples=2)
    return live, optimizer


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loss_of_lbfgs_that_is_that_of_one_rank_is_refused_with_the_closure_as_the_fix(tmp_path, mode):
    def save(ranks):
        live, optimizer = run_of(ranks, torch.optim.LBFGS)
        (state,) = optimizer.state.values()
        state["prev_loss"] += ranks.rank
        manager = CheckpointManager(str(tmp_path / "run"), every=None, at_end=False, collectives=ranks, mode=mode)
        try:
            manager.save(live)
            manager.close()
        except RanksDisagree as error:
            return error.where, error.fix
        finally:
            with contextlib.suppress(RanksDisagree):
                manager.close()
        return "nothing"

    for where, fix in run_threads(2, save):
        assert where.endswith("['prev_loss']")
        assert "closure of LBFGS" in fix
        assert "extra=" not in fix


def test_ranks_with_other_paths_are_said_at_once_and_in_the_save_that_fails(tmp_path, caplog):
    """P06: a time in the name of a run, or a rank, made each rank its own; the first save said only that a file was missing."""

    def save(ranks):
        live, _ = run_of(ranks)
        with CheckpointManager(
            str(tmp_path / f"run-{ranks.rank}"), every=None, at_end=False, collectives=ranks
        ) as manager:
            manager.restore(live)
            try:
                manager.save(live)
            except (SaveFailed, SaveFailedElsewhere) as error:
                return str(error)
        return "nothing"

    with caplog.at_level(logging.WARNING, "trainfold"):
        texts = run_threads(2, save)
    (warning,) = [each.getMessage() for each in caplog.records if "not the same path" in each.getMessage()]
    for rank in (0, 1):
        assert f"run-{rank} on rank {rank}" in warning
        assert f"run-{rank} on rank {rank}" in texts[0]
    assert "nothing" not in texts

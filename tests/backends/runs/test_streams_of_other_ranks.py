"""Random streams of another number of ranks are derived, with one notice."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import PATIENT

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.streams.rng_streams import capture_streams, preserved_rng
from trainfold.backends.derived_streams import derive_streams
from trainfold.backends.ranks.in_process import SingleProcess, run_threads
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import ResumeRefused
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.state import Opaque, Progress, TrainState


def state_of(streams, step=0):
    return TrainState(trainer=Progress(step=step), rng=Opaque(streams))


def streams_of(seed):
    """The streams that a rank has after it was seeded and has drawn."""
    with preserved_rng():
        torch.manual_seed(seed)
        torch.rand(3)
        return capture_streams()


@settings(max_examples=15)
@given(before=st.integers(1, 4), after=st.integers(1, 4), step=st.integers(0, 9), seed=st.integers(0, 2**40))
def test_ranks_of_another_world_continue_with_streams_of_seed_step_and_share(before, after, step, seed):
    """H01, H03, M30: as many ranks get their own bits back; others the same ones at each resume, and no two shares the same."""
    store, saved = MemoryStore(), [streams_of(seed + rank) for rank in range(before)]
    run_threads(before, lambda ranks: save(state_of(saved[ranks.rank], step), store, collectives=ranks))
    like = state_of(streams_of(99))
    for _ in range(2):
        found = run_threads(after, lambda ranks: load(store, like=like, collectives=ranks))
        wanted = saved if before == after else [derive_streams(seed, step=step, rank=rank) for rank in range(after)]
        assert [fingerprint(each) for each in found] == [fingerprint(state_of(each, step)) for each in wanted]
    assert len({each.rng.value["torch"].numpy().tobytes() for each in found}) == after


def test_the_notice_comes_once_and_a_policy_refuses_instead(caplog):
    """H03: the notice has the seed and the step, and comes from rank 0 alone."""
    store, like = MemoryStore(), state_of(streams_of(99))
    saved = state_of(streams_of(7), 4)  # not in the threads, which share torch's generator
    run_threads(2, lambda ranks: save(saved, store, collectives=ranks))
    with caplog.at_level(logging.WARNING):
        run_threads(3, lambda ranks: load(store, like=like, collectives=ranks))
    (text,) = [each.getMessage() for each in caplog.records if "random streams" in each.getMessage()]
    assert "belong to 2 ranks and cannot continue on 3" in text
    assert "seed 7, step 4" in text
    assert "new ones, derived from the seed" in str(plan(store, like=like))
    with pytest.raises(ResumeRefused, match="random streams of 2 ranks"):
        load(store, like=like, policy={"streams": "refuse"})
    kept = load(store, like=like, reset={"rng": "the script has seeded them"})
    assert torch.equal(kept.rng.value["torch"], like.rng.value["torch"])


def test_what_cannot_be_derived_is_refused():
    """H04: a state of another kind, and streams for a target that has none of this kind, mean what only their owner knows."""
    store = MemoryStore()
    run_threads(
        2, lambda ranks: save(TrainState(trainer=Progress(), rng={"seed": ranks.rank}), store, collectives=ranks)
    )
    for like in (TrainState(trainer=Progress(), rng={"seed": 9}), state_of(streams_of(9))):
        with pytest.raises(ResumeRefused, match=r"per_rank.*random streams of 2 ranks"):
            load(store, like=like)


def seeds_of_replicas(collectives, folder):
    """The seed with which each rank of a tensor-parallel group continues, where every rank of it reads the same data."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    live = attach(model)
    torch.manual_seed(collectives.rank)
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.restore(live)
    return torch.initial_seed()


def test_ranks_that_share_data_continue_with_the_same_streams(processes, tmp_path):
    """H02, H03: else the ranks of a tensor-parallel group would drop out other units of one activation."""
    torch.manual_seed(0)
    live = attach(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with CheckpointManager(tmp_path / "run", collectives=SingleProcess()) as manager:
        live.advance(samples=1)
        manager.save(live)
    one, other = processes.run(2, seeds_of_replicas, str(tmp_path / "run"), collectives=PATIENT)
    generator = torch.Generator()
    generator.set_state(trainfold.random.derive_streams(0, step=1, rank=0)["torch"])
    assert one == other == generator.initial_seed()

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
from trainfold.backends.ranks.in_process import SingleProcess, run_threads, thread_outcomes
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


@st.composite
def shares_of_meshes(draw, size):
    """The share of each rank, as a mesh of shares x copies gives it in either order, and the number of shares."""
    shares = draw(st.sampled_from([each for each in range(1, size + 1) if not size % each]))
    is_outer = draw(st.booleans())
    return [rank // (size // shares) if is_outer else rank % shares for rank in range(size)], shares


@settings(max_examples=40)
@given(data=st.data(), before=st.sampled_from([2, 4, 6]), is_other=st.booleans())
def test_after_any_pair_of_meshes_streams_are_equal_on_equal_shares_and_differ_on_others(data, before, is_other):
    """H02, H03, P12: ranks of one tensor-parallel group drop out the same units, and no two shares of the data have the same masks.

    Streams followed the rank where the number of ranks was the same: two ranks that had read two shares kept two streams for one.
    """
    after = 3 if is_other else before
    (old, shares), (new, others) = data.draw(shares_of_meshes(before)), data.draw(shares_of_meshes(after))
    store, seeded = MemoryStore(), [streams_of(share) for share in range(shares)]

    def on(share, count, streams):
        return state_of({**streams, "share": share, "shares": count}, 5)

    run_threads(
        before, lambda ranks: save(on(old[ranks.rank], shares, seeded[old[ranks.rank]]), store, collectives=ranks)
    )
    fresh = streams_of(99)
    found = run_threads(after, lambda ranks: load(store, like=on(new[ranks.rank], others, fresh), collectives=ranks))
    texts = [each.rng.value["torch"].numpy().tobytes() for each in found]
    assert len({*zip(texts, new, strict=True)}) == len({*texts}) == others
    assert [(each.rng.value["share"], each.rng.value["shares"]) for each in found] == [(each, others) for each in new]
    if (old, shares) == (new, others):
        assert texts == [seeded[share]["torch"].numpy().tobytes() for share in new]


def test_other_shares_on_as_many_ranks_are_said_once_and_a_policy_refuses_them(caplog):
    """H03: rank 0 says it, which itself may have the share that it had."""
    store, saved, fresh = MemoryStore(), [streams_of(share) for share in range(2)], state_of(streams_of(99))

    def on(share, streams):
        return fresh.evolve(rng=Opaque({**streams, "share": share, "shares": 2}))

    run_threads(4, lambda ranks: save(on(ranks.rank // 2, saved[ranks.rank // 2]), store, collectives=ranks))
    with caplog.at_level(logging.WARNING):
        run_threads(4, lambda ranks: load(store, like=on(ranks.rank % 2, saved[0]), collectives=ranks))
    (text,) = [each.getMessage() for each in caplog.records if "random streams" in each.getMessage()]
    assert (
        "belong to 2 shares of the data on 4 ranks and cannot continue on 2 shares of the data on 4 ranks, in another order;"
        in text
    )
    refusing = {"policy": {"streams": "refuse"}}
    outcomes = thread_outcomes(
        4, lambda ranks: load(store, like=on(ranks.rank % 2, saved[0]), collectives=ranks, **refusing)
    )
    assert {type(each.error) for each in outcomes} == {ResumeRefused}
    run_threads(4, lambda ranks: load(store, like=on(ranks.rank // 2, saved[0]), collectives=ranks, **refusing))
    run_threads(
        4, lambda ranks: load(store, like=fresh, collectives=ranks, **refusing)
    )  # which does not know its share


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


def streams_on_other_meshes(collectives, folder):
    """What a rank draws next after a resume of two ranks of FSDP2 as a tensor-parallel group, and back, and as it was."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))

    def run_as(way, seed):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        live = attach(
            fully_shard(model, mesh=mesh)
            if way == "fsdp"
            else parallelize_module(model, mesh, {"0": ColwiseParallel()})
        )
        torch.manual_seed(seed)
        with CheckpointManager(folder, collectives=collectives) as manager:
            manager.restore(live)
            live.advance(samples=1)
            manager.save(live)
        return torch.rand(1).item()

    return [run_as(way, 100 + (collectives.rank if way == "fsdp" else 0)) for way in ("fsdp", "tp", "tp", "fsdp")]


def test_streams_belong_to_the_share_of_the_data_also_where_the_number_of_ranks_stays(processes, tmp_path):
    """H02, P12: the shares come from the model, and are saved beside the streams. Two ranks of FSDP2 were resumed with two streams for one activation."""
    fsdp, *both_tp, back = zip(
        *processes.run(2, streams_on_other_meshes, str(tmp_path / "run"), collectives=PATIENT), strict=True
    )
    assert [len({*each}) for each in (fsdp, *both_tp, back)] == [2, 1, 1, 2]
    assert both_tp[0] == both_tp[1]  # neither save nor resume moves them


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

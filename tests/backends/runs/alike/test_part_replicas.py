"""Parts of tensors that several ranks hold (HSDP) are compared between these ranks: one of them writes for all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import disagreements

from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import thread_outcomes
from trainfold.backends.runs.api import save
from trainfold.backends.runs.snapshot import describe_state
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.stage import make_stage
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

WHOLE = torch.arange(24.0).reshape(6, 4)


def state(rank, *, step=1, drift=None, is_copied=True):
    """Ranks 0 and 2 hold the first rows of two tensors, ranks 1 and 3 the others."""
    rows = 3 * (rank % 2)
    params = {}
    for name in ("a", "b"):
        part = WHOLE[rows : rows + 3].clone()
        if drift is not None and drift[0] == rank and drift[1] == name:
            part[drift[2], 1] += 1e-6
        params[name] = Shard(part, (6, 4), (rows, 0), is_copied)
    model = ModelState(params=Leaves(params), buffers=Leaves(), ties=())
    return TrainState(model=model, trainer=Progress(step=step))


@given(rank=st.integers(0, 3), name=st.sampled_from("ab"), row=st.integers(0, 2))
def test_a_bit_that_differs_between_two_copies_of_a_part_is_refused_on_every_rank_naming_the_leaf(rank, name, row):
    store = MemoryStore()
    drift = (rank, name, row)
    outcomes = thread_outcomes(4, lambda ranks: save(state(ranks.rank, drift=drift), store, collectives=ranks))
    text = disagreements(outcomes)
    assert text.startswith(f"model.params[{name!r}]: expected the bits of rank {rank % 2}, which holds the same part")
    assert f"on rank {max(rank, rank % 2 + 2)}" in text
    assert "manifest.json" not in store.list("step-00000001"), "nothing is committed"


def of_two_axes(rank, *, drift):
    """On a mesh of 2 x 2 each rank has another part of one tensor, and two ranks each half of another, such as that of a norm."""
    mesh, params = make_mesh((2, 2)), {}
    for name, cuts in (("weight", [[0], [1]]), ("norm", [[0]]), ("bias", [[], [1]])):
        rule = make_placement(mesh, cuts)
        box = rule.box((6, 4), mesh.coordinate_of(rank))
        part = WHOLE[tuple(slice(low, high) for low, high in box)].clone()
        part[0, 0] += drift == (rank, name)
        params[name] = Shard(part, (6, 4), tuple(low for low, _ in box), len(cuts) == 1 or not cuts[0], rule)
    return TrainState(model=ModelState(params=Leaves(params), buffers=Leaves()), trainer=Progress(step=1))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("name", "other"), [("norm", 1), ("bias", 2)])
def test_parts_that_some_ranks_have_alike_are_compared_although_these_ranks_differ_in_other_parts(rank, name, other):
    """B06: a norm under tensor parallelism and fully_shard. It was not compared, because its ranks hold other parts of other tensors."""
    store, drift = MemoryStore(), (rank, name)
    outcomes = thread_outcomes(4, lambda ranks: save(of_two_axes(ranks.rank, drift=drift), store, collectives=ranks))
    first, last = sorted((rank, rank ^ other))
    text = disagreements(outcomes)
    assert text.startswith(f"model.params[{name!r}]: expected the bits of rank {first}, which holds the same part")
    assert f"on rank {last}" in text


@pytest.mark.parametrize(("stage", "compared"), [(None, {"w", "norm"}), (make_stage([1], 2), {"norm"})])
def test_of_the_parts_of_a_stage_those_are_compared_that_another_rank_of_the_stage_may_hold(stage, compared):
    """B06: ranks 4 to 7 train a stage. A digest of what each rank of it alone holds would cost time and be compared with none."""
    params = {
        name: Shard(
            WHOLE[:3],
            (6, 4),
            (0, 0),
            is_copied=True,
            placement=make_placement(make_mesh(shape, first=4, strides=strides), cuts),
        )
        for name, shape, strides, cuts in (("w", (2, 2), (2, 1), [[0], [1]]), ("norm", (2,), (2,), [[0]]))
    }
    state = TrainState(model=ModelState(params=Leaves(params), buffers=Leaves()), trainer=Progress(step=1), stage=stage)
    found = {
        path
        for name, leaves in describe_state(state).replicated().items()
        for path in leaves
        if name.startswith("model")
    }
    assert found == {f"model.params[{name!r}]" for name in compared}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_copies_of_a_part_are_compared_at_each_save_of_a_manager(mode):
    store = MemoryStore()

    def work(ranks):
        with CheckpointManager(store, mode=mode, collectives=ranks) as manager:
            manager.save(state(ranks.rank))
            manager.drain()
            manager.save(state(ranks.rank, step=2, drift=(3, "b", 0)))
            manager.drain()

    assert disagreements(thread_outcomes(4, work)).startswith("model.params['b']")
    assert "manifest.json" in store.list("step-00000001")


def test_parts_that_one_rank_holds_are_compared_with_none():
    store = MemoryStore()

    def work(ranks):
        part = Shard(torch.full((2,), float(ranks.rank)), (6,), (2 * ranks.rank,))
        model = ModelState(params=Leaves({"w": part}), buffers=Leaves(), ties=())
        save(TrainState(model=model, trainer=Progress(step=1)), store, collectives=ranks)

    assert all(outcome.error is None for outcome in thread_outcomes(3, work))

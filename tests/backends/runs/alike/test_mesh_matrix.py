"""The mesh matrix: what any layout (dp, fsdp, hsdp, tp, fsdp x tp) over 1 to 8 ranks saved, any other one loads with the same bits, and so does one process."""

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from kit.backends.mesh_cases import ALL, Layout, shapes, state
from kit.depth import IS_DEEP

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.layout.shard import Shard

ALONE = Layout("dp", (1,))


def tensors(state):
    """Every tensor in memory, in the order of the state."""
    leaves = tree.leaves((dict(state.model.params), {name: dict(each) for name, each in state.optimizer.slots.items()}))
    return [leaf.tensor if isinstance(leaf, Shard) else leaf for leaf in leaves]


def check(values, source, targets):
    """Save on one layout, load on others, and compare each rank's memory with its part of the original."""
    store = MemoryStore()
    run_threads(source.size, lambda world: save(state(values, source, world.rank), store, collectives=world))
    for target in targets:

        def loaded(world, target=target):
            return load(
                store, like=state(values, target, world.rank, fill=-1.0), collectives=world, policy={"world": "adapt"}
            )

        for rank, found in enumerate(run_threads(target.size, loaded)):
            wanted = tensors(state(values, target, rank))
            assert all(torch.equal(*pair) for pair in zip(tensors(found), wanted, strict=True)), (source, target, rank)


def numbered(sizes):
    """Tensors of which no two elements are alike."""
    found, start = {}, 0.0
    for role, shape in sizes.items():
        count = int(torch.Size(shape).numel())
        found[role] = torch.arange(start, start + count).view(shape)
        start += count
    return found


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@settings(deadline=None, max_examples=200 if IS_DEEP else 12)
@example(source=Layout("fsdp x tp", (2, 4)), target=Layout("hsdp", (4, 2)), sizes=(7, 5, 6))
@example(source=Layout("tp", (8,)), target=Layout("fsdp", (3,)), sizes=(3, 1, 13))
@given(
    source=st.sampled_from(ALL),
    target=st.sampled_from(ALL),
    sizes=st.tuples(st.integers(0, 13), st.integers(1, 9), st.integers(0, 13)),
)
def test_what_any_mesh_saved_any_other_mesh_and_one_process_load_with_the_same_bits(source, target, sizes):
    """X01, N01: with uneven and empty parts, parameters and slots."""
    event(f"{source.kind} to {target.kind}")
    check(numbered(shapes(*sizes)), source, {target, ALONE})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize("source", ALL, ids=str)
def test_every_pair_of_meshes(source):
    """X01, N01: each layout onto each other one, with seven rows, which no mesh of several ranks divides."""
    check(numbered(shapes(7, 5, 6)), source, ALL)

"""Ranks that hold the same tensors share the writing, and a checkpoint looks the same whatever ranks wrote it."""

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from trainfold.adapters.cli.diff import diff_checkpoints
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.hold.hold import Hold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.save import save_snapshot
from trainfold.backends.runs.snapshot import describe_state
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import RanksDisagree, SaveFailed
from trainfold.core.format.fingerprint import content_fingerprint, fingerprint
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

ROWS = 40_000  # a leaf of this many numbers is divided


def leaf(kind, seed):
    made = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(seed))
    return {
        "numbers": lambda: made,
        "one long row": lambda: made.view(1, -1).to(torch.bfloat16),
        "few large rows": lambda: made.view(2, 5, 3, -1),
        "transposed": made.t,
        "conjugated": lambda: torch.complex(made, made).conj(),
        "booleans": lambda: made > 0,
        "small": made[:2].clone,
        "scalar": made[0, 0].clone,
        "empty": made[:0].clone,
    }[kind]()


KINDS = [
    "numbers",
    "one long row",
    "few large rows",
    "transposed",
    "conjugated",
    "booleans",
    "small",
    "scalar",
    "empty",
]


def state_of(kinds):
    leaves = {f"w{index}": leaf(kind, index) for index, kind in enumerate(kinds)}
    return TrainState(model=ModelState(Leaves(leaves), Leaves()), trainer=Progress(step=1))


def held_save(state, store, world):
    """What a save in the background does, with an update that comes at once."""
    snapshot = describe_state(state)
    hold = Hold(snapshot.named(), check=True)
    update = threading.Thread(target=hold.protect)
    update.start()
    result = save_snapshot(lambda: snapshot, store, collectives=world, hold=hold)
    update.join()
    hold.release()
    return result


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_what_ranks_share_is_read_back_and_has_the_fingerprint_of_the_state(kinds, ranks, is_held):
    """N05, X02: recorded fingerprints are those of the state for every number of ranks, and so are the bits."""
    state, store = state_of(kinds), MemoryStore()
    action = held_save if is_held else lambda state, store, world: save(state, store, collectives=world)
    result = run_threads(ranks, lambda world: action(state, store, world))[0]
    assert result.fingerprints == fingerprint(state)
    assert fingerprint(load(store, like=state)) == fingerprint(state)
    assert run_threads(3, lambda world: fingerprint(load(store, like=state, collectives=world)))[2] == fingerprint(
        state
    )


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(("shape", "replicas"), [((40_000, 3), 2), ((4, 30_000), 3)], ids=["rows", "inside of rows"])
def test_replicas_of_a_part_share_it(shape, replicas, is_held):
    """N05, N04: the replicas of two parts (HSDP) write as much each, and any number of ranks loads it."""
    rule, value = make_placement(make_mesh((replicas, 2)), [[1]]), leaf("numbers", 0).reshape(shape)

    def state(rank, rule=rule):
        box = rule.box(shape, rule.mesh.coordinate_of(rank))
        (low, high), _ = box
        part = Shard(value[low:high].clone(), shape, (low, 0), is_copied=True, placement=rule)
        return TrainState(model=ModelState(Leaves({"w": part}), Leaves()), trainer=Progress(step=1))

    store, ranks = MemoryStore(), 2 * replicas
    action = held_save if is_held else lambda state, store, world: save(state, store, collectives=world)
    run_threads(ranks, lambda world: action(state(world.rank), store, world))
    sizes = [store.size(f"step-00000001/{name}") for name in store.list("step-00000001") if name.startswith("model-")]
    assert len(sizes) == ranks
    assert max(sizes) - 4096 == value.nbytes / ranks
    target = TrainState(model=ModelState(Leaves({"w": torch.zeros_like(value)}), Leaves()), trainer=Progress(step=0))
    assert torch.equal(load(store, like=target).model.params["w"], value)
    thirds = make_placement(make_mesh((3,)), [[0]])
    loaded = run_threads(3, lambda world: load(store, like=state(world.rank, thirds), collectives=world))
    assert torch.equal(torch.cat([each.model.params["w"].tensor for each in loaded]), value)


@pytest.fixture
def runs(tmp_path):
    """The same state, saved by 1, 2 and 4 ranks."""
    state = state_of(["numbers", "numbers", "booleans", "one long row", "few large rows", "small"])
    for ranks in (1, 2, 4):
        store = LocalStore(tmp_path / str(ranks))
        run_threads(ranks, lambda world, store=store: save(state, store, collectives=world))
    return state, tmp_path


def test_a_checkpoint_looks_the_same_whatever_ranks_shared_it(runs):
    """U02: `verify`, `verify --contents` and `diff` show one fingerprint at 1, 2 and 4 ranks."""
    state, place = runs
    for ranks in (1, 2, 4):
        shown = verify_checkpoint(place / str(ranks), contents=True).data
        assert shown["verified"]
        found = {each["name"]: (each["fingerprint"], each["contents"]) for each in shown["components"]}
        wanted = {name: (text, content_fingerprint(state)[name]) for name, text in fingerprint(state).items()}
        assert found == wanted
        files = [*(place / str(ranks) / "step-00000001").glob("model-*")]
        parts = [part for file in files for part in load_file(file).values()]
        assert sum(part.nbytes for part in parts) == sum(leaf.nbytes for leaf in state.model.params.values())
        sizes = [file.stat().st_size for file in files]
        assert len(sizes) == ranks
        assert max(sizes) - min(sizes) <= max(0.02 * sum(sizes) / ranks, 2**16)
        assert diff_checkpoints(place / "1", place / str(ranks)).data["same"]


def test_a_wrong_digest_of_a_shared_tensor_is_found(runs, monkeypatch):
    """U04: nothing that a fingerprint is made of is believed."""
    from trainfold.backends.formats.native import writer

    state, place = runs
    monkeypatch.setattr(writer._Stream, "_rest_of", lambda *_: iter([b"other"]))
    store = LocalStore(place / "wrong")
    run_threads(2, lambda world: save(state, store, collectives=world))
    shown = verify_checkpoint(place / "wrong").data
    assert not shown["verified"]
    assert {"digest of model.params['w1']" in json.dumps(each) for each in shown["problems"]} == {True}


def test_a_leaf_of_which_replicas_write_rows_is_still_compared():
    """B06, R07: a bit that differs, in rows that another rank writes, is found and the leaf is named."""
    state = state_of(["numbers"])

    def train(world):
        mine = state_of(["numbers"])
        mine.model.params["w0"][-1 if world.rank == 0 else 0, 0] += 1
        with pytest.raises(RanksDisagree) as caught:
            save(mine, store, collectives=world)
        return caught.value.where

    store = MemoryStore()
    assert run_threads(2, train) == ["model.params['w0']"] * 2
    assert fingerprint(state) == fingerprint(state_of(["numbers"]))


@pytest.mark.parametrize("rows", ["first", "last"])
def test_a_write_to_rows_of_another_rank_fails_a_held_save(rows):
    """D02: an unannounced write to a leaf is found by each rank that writes rows of it."""
    store = MemoryStore()

    def train(world):
        state = state_of(["numbers"])
        snapshot = describe_state(state)
        hold = Hold(snapshot.named())
        state.model.params["w0"][0 if rows == "first" else -1] += 1
        with pytest.raises(SaveFailed):
            save_snapshot(lambda: snapshot, store, collectives=world, hold=hold)
        hold.release()

    run_threads(2, train)

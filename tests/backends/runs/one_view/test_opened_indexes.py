"""A rank opens the indexes in which what it needs is; what is wrong with any of them is found by all ranks, and an older checkpoint is loaded."""

from collections import Counter

import pytest
import torch

import trainfold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.states import PerRank

LEAVES, ROWS, COLUMNS = 3, 24, 5


class Counted:
    """A store that counts the files that one rank reads, and those whose size it looks at."""

    def __init__(self, inner):
        self.inner, self.reads, self.sizes = inner, Counter(), Counter()

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def read(self, name, *, start=0, stop=None):
        self.reads[name.rpartition("/")[2]] += 1
        return self.inner.read(name, start=start, stop=stop)

    def size(self, name):
        self.sizes[name.rpartition("/")[2]] += 1
        return self.inner.size(name)


def state_at(world, step, mesh, cuts):
    """The state of an Adam under FSDP2 or HSDP: parameters and moments are cut, and each has a step of its own."""
    rule = make_placement(mesh, cuts)
    box = rule.box((ROWS, COLUMNS), mesh.coordinate_of(world.rank))

    def cut(value):
        part = torch.full([high - low for low, high in box], float(value))
        return Shard(part, (ROWS, COLUMNS), tuple(low for low, _ in box), placement=rule)

    names = [f"w{number}" for number in range(LEAVES)]
    slots = {name: {"exp_avg": cut(step + 0.5), "step": torch.tensor(float(step))} for name in names}
    return TrainState(
        model=ModelState(params=Leaves({name: cut(step) for name in names}), buffers=Leaves({})),
        optimizer=OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (ParamGroup({}, tuple(names)),)),
        trainer=Progress(step=step),
    )


def with_own(state, rank):
    """The state with a meter and a queue of each rank."""
    queue = {"next": torch.full((2,), float(rank)), "read": rank}
    return state.evolve(extra={"meter": PerRank({"seen": rank}), "queue": PerRank(queue)})


def saved(shape, cuts, *steps, own=False):
    mesh, store = make_mesh(shape), MemoryStore()

    def work(world):
        for step in steps:
            state = state_at(world, step, mesh, cuts)
            trainfold.save(with_own(state, world.rank) if own else state, store, collectives=world)

    run_threads(mesh.size, work)
    return store


def loaded(store, shape, cuts):
    """The step that each rank has loaded, and the ranks whose indexes it has opened."""
    mesh = make_mesh(shape)

    def work(world):
        mine = Counted(store)
        state = trainfold.load(mine, like=state_at(world, 0, mesh, cuts), collectives=world, policy={"world": "adapt"})
        wanted = state_at(world, state.trainer.step, mesh, cuts)
        for name, leaf in wanted.model.params.items():
            assert torch.equal(state.model.params[name].tensor, leaf.tensor)
            assert torch.equal(
                state.optimizer.slots[name]["exp_avg"].tensor, wanted.optimizer.slots[name]["exp_avg"].tensor
            )
        return state.trainer.step, sorted(int(name.split("-")[1]) for name in mine.reads if name.startswith("index-"))

    return run_threads(mesh.size, work)


ROWWISE, SHARDED, COLUMNWISE = [[0]], [[1]], [[], [0]]


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
@pytest.mark.parametrize(
    ("before", "after", "cuts", "opened"),
    [
        ((8,), (8,), (ROWWISE, ROWWISE), [[rank] if rank else [] for rank in range(8)]),
        ((8,), (4,), (ROWWISE, ROWWISE), [[1], [2, 3], [4, 5], [6, 7]]),
        ((4,), (8,), (ROWWISE, ROWWISE), [[], [], [1], [1], [2], [2], [3], [3]]),
        ((2, 4), (8,), (SHARDED, ROWWISE), [[4], [4], [1, 5], [1, 5], [2, 6], [2, 6], [3, 7], [3, 7]]),
        ((4,), (2,), (COLUMNWISE, ROWWISE), [[1, 2], [1, 2]]),  # of five columns rank 3 has none
    ],
)
def test_a_rank_opens_the_indexes_of_the_ranks_that_wrote_what_it_needs(before, after, cuts, opened):
    """V12: with 64 ranks of 10,000 leaves, opening all of them costs every rank seconds. Rank 0's index is in the root."""
    store = saved(before, cuts[0], 1)
    found = loaded(store, after, cuts[1])
    assert found == [(1, each) for each in opened]


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_an_index_that_only_one_rank_opens_is_missed_by_all(harm):
    """V05: every rank then looks at everything, finds the same, and an older checkpoint is loaded."""
    store = saved((4,), ROWWISE, 1, 2)
    name = "step-00000002/index-00002-of-00004.json"
    data = store.read(name)
    store.delete(name)
    if harm == "damaged":
        store.write(name, [data[:-2] + b"]\n"], size_bytes=len(data))
    with pytest.warns(CheckpointPassedOver, match="index-00002"):
        found = loaded(store, (4,), ROWWISE)
    assert [step for step, _ in found] == [1] * 4


@pytest.mark.parametrize(("before", "after", "in_all", "on_a_rank"), [(8, 8, 1, 1), (8, 4, 2, 4), (4, 8, 3, 2)])
@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
def test_what_ranks_have_of_their_own_is_read_by_one_rank_for_all(before, after, in_all, on_a_rank):
    """V12: every rank opened every index where ranks had more of their own than random streams, such as positions of loaders."""
    store, mesh = saved((before,), ROWWISE, 1, own=True), make_mesh((after,))
    same = before == after

    def work(world):
        mine = Counted(store)
        like = with_own(state_at(world, 0, mesh, ROWWISE), -1)
        policy = {"world": "adapt"} if same else {"world": "adapt", "per_rank": "adapt"}
        state = trainfold.load(mine, like=like, collectives=world, policy=policy)
        assert state.extra["meter"].value["seen"] == (world.rank if same else -1)
        assert state.extra["queue"].value["next"].tolist() == [float(world.rank if same else -1)] * 2
        return mine.reads

    reads = run_threads(after, work)
    indexes = {name for each in reads for name in each if name.startswith("index-")}
    assert len(indexes) == before - 1
    # once for all, and by those who need its shards
    assert max(sum(each[name] for each in reads) for name in indexes) <= in_all
    assert max(sum(each[name] for name in indexes) for each in reads) <= on_a_rank


def test_ranks_share_the_work_of_looking_at_files():
    """V12: each of 64 ranks looked at the size of each of 255 files."""
    looks = {}
    for count in (4, 16):
        store, mesh = saved((count,), ROWWISE, 1), make_mesh((count,))

        def work(world, store=store, mesh=mesh):
            mine = Counted(store)
            trainfold.load(mine, like=state_at(world, 0, mesh, ROWWISE), collectives=world)
            return {
                name: times for name, times in mine.sizes.items() if name.endswith(".safetensors") or "index-" in name
            }

        found = run_threads(count, work)
        assert {name for each in found for name in each} == {
            name for name in store.list("step-00000001") if name.endswith(".safetensors") or "index-" in name
        }
        looks[count] = max(len(each) for each in found)
    assert looks[16] <= looks[4] + 1


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_file_that_no_rank_reads_is_looked_at_by_one_and_missed_by_all(harm):
    """V05: a checkpoint that lost a file is passed over, although the components that are asked for are whole."""
    store, mesh = saved((4,), ROWWISE, 1, 2), make_mesh((4,))
    (name,) = [each for each in store.list("step-00000002") if each.startswith("optimizer-00003")]
    data = store.read(f"step-00000002/{name}")
    store.delete(f"step-00000002/{name}")
    if harm == "short":
        store.write(f"step-00000002/{name}", [data[:-1]], size_bytes=len(data) - 1)

    def work(world):
        like = state_at(world, 0, mesh, ROWWISE)
        return trainfold.load(store, like=like, components=["trainer"], collectives=world).trainer.step

    with pytest.warns(CheckpointPassedOver, match="optimizer-00003"):
        assert run_threads(4, work) == [1] * 4


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_an_index_that_one_rank_reads_for_all_is_missed_by_all(harm):
    """V05: what it has for all ranks cannot be sent, so every rank looks itself, and an older checkpoint is loaded."""
    store, mesh = saved((4,), ROWWISE, 1, 2, own=True), make_mesh((4,))
    name = "step-00000002/index-00002-of-00004.json"
    data = store.read(name)
    store.delete(name)
    if harm == "damaged":
        store.write(name, [data[:-2] + b"]\n"], size_bytes=len(data))

    def work(world):
        like = with_own(state_at(world, 0, mesh, ROWWISE), -1)
        return trainfold.load(store, like=like, collectives=world).extra["meter"].value["seen"]

    with pytest.warns(CheckpointPassedOver, match="index-00002"):
        assert run_threads(4, work) == [0, 1, 2, 3]

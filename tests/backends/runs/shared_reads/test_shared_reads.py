"""Shared reads: bytes that several ranks need are read from the store by one of them, and each rank verifies all that it uses."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import RankFault, ThreadCollectives, run_threads, thread_outcomes
from trainfold.backends.runs import shared_reads
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointDamaged, RankFailed, TrainfoldError
from trainfold.core.format.manifest import PIECE_BYTES
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

pytestmark = [
    pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift"),
    pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver"),
]
COLUMNS = [[], [0]]


class Slow:
    """A store as one rank sees it, and that all ranks share. It counts what the rank reads of data files, and changes bytes on their way to it."""

    is_shared = True

    def __init__(self, store, *, damages=(), step=1):
        self._store, self._damages, self._step, self._read = store, damages, f"step-{step:08}/model", []

    @property
    def read_bytes(self):
        """Counted by a list: threads of one rank read side by side, and one of two additions at once would be lost."""
        return sum(self._read)

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read_into(self, name, buffer, *, start=0):
        self._store.read_into(name, buffer, start=start)
        self._read.append(len(buffer))
        for place in self._damages:
            if start <= place < start + len(buffer) and name.startswith(self._step):
                buffer[place - start] ^= 1

    @contextmanager
    def opened(self, name):
        yield lambda buffer, start: self.read_into(name, buffer, start=start)


def state_of(values, cuts, mesh, rank, step=1):
    """A state whose leaves are cut by a rule, or whole."""
    leaves = {}
    for name, value in values.items():
        rule = make_placement(mesh, cuts[name])
        box = rule.box(tuple(value.shape), mesh.coordinate_of(rank))
        part = value[tuple(slice(*side) for side in box)].clone()
        is_cut = any(cuts[name])
        leaves[name] = Shard(part, tuple(value.shape), tuple(low for low, _ in box), placement=rule) if is_cut else part
    return TrainState(model=ModelState(Leaves(leaves), Leaves()), trainer=Progress(step=step))


def noise(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).mul(40_503).view(shape)


def saved(values, cuts, mesh):
    store = MemoryStore()
    run_threads(mesh.size, lambda world: save(state_of(values, cuts, mesh, world.rank), store, collectives=world))
    return store


def loads(store, values, cuts, mesh, *, damages=None, fail_at=None, step=None):
    """Load on every rank of a mesh: how each ends, and what it read."""
    stores = [Slow(store, damages=(damages or {}).get(rank, ())) for rank in range(mesh.size)]

    def loaded(world):
        like = state_of({name: torch.zeros_like(each) for name, each in values.items()}, cuts, mesh, world.rank)
        return load(stores[world.rank], like=like, collectives=world, policy={"world": "adapt"}, step=step)

    return thread_outcomes(mesh.size, loaded, fail_at=fail_at), [each.read_bytes for each in stores]


def check(outcomes, values, cuts, mesh):
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        wanted = state_of(values, cuts, mesh, outcome.rank).model.params
        for name, leaf in outcome.value.model.params.items():
            found, expected = (getattr(each, "tensor", each) for each in (leaf, wanted[name]))
            assert torch.equal(found, expected)


def size_of(values):
    return sum(value.nbytes for value in values.values())


def cuts_of(data, mesh, names):
    """For each tensor of two dimensions the axes of the mesh that cut it, the inner dimension too."""
    rules = [[], [[0]], [[], [0]]]
    rules += [[[0], [1]], [[], [1]], [[1, 0]]] if len(mesh.shape) > 1 else []
    return {name: data.draw(st.sampled_from(rules)) for name in names}


GRID = 3  # ranks that are connected to each other; more stand in a grid


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_ranks_that_share_a_store_load_what_was_saved_and_read_each_byte_once(data):
    """X01, X03: any rule on any mesh to any other, in small rounds, with small, uneven and empty parts, columns and replicas, in a mesh of all ranks or in a grid."""
    sizes = st.tuples(st.integers(1, 40), st.sampled_from([1, 9, 700, 9_000]))
    values = {name: noise(*data.draw(sizes)) for name in "abc"}
    meshes = [(1,), (2,), (3,), (2, 2)]
    before, after = (make_mesh(data.draw(st.sampled_from(some))) for some in (meshes, [*meshes, (5,), (2, 3), (7,)]))
    store = saved(values, cuts_of(data, before, values), before)
    cuts = cuts_of(data, after, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads, "ROUND_BYTES", data.draw(st.sampled_from([5_000, 300_000, 1 << 21])))
        patch.setattr(shared_reads, "_MESH_RANKS", data.draw(st.sampled_from([GRID, 256])))
        outcomes, read = loads(store, values, cuts, after)
    check(outcomes, values, cuts, after)
    event(f"{min(sum(call.kind == 'exchange' for call in outcomes[0].schedule), 3)} exchanges")
    if after.size > 1:
        assert sum(read) == size_of(values)


@pytest.mark.parametrize("most", [GRID, 256])
@pytest.mark.parametrize(("mesh", "cuts"), [((4,), COLUMNS), ((2, 2), [[0], [1]]), ((2, 2), [[], [1]]), ((6,), [[]])])
def test_each_rank_reads_its_share_of_what_all_need(mesh, cuts, most, monkeypatch):
    """X03: a load of tensor parallelism reads at most 1.25 x what it needs; six replicas together what one of them needs."""
    monkeypatch.setattr(shared_reads, "_MESH_RANKS", most)
    values = {"w": noise(4096, 640), "v": noise(1000, 700), "small": noise(40, 60)}
    mesh, every = make_mesh(mesh), dict.fromkeys(values, cuts)
    store = saved(values, {name: [[0]] for name in values}, make_mesh((2,)))
    outcomes, read = loads(store, values, every, mesh)
    check(outcomes, values, every, mesh)
    assert sum(read) == size_of(values)
    assert max(read) <= 1.25 * size_of(values) / mesh.size + PIECE_BYTES


@pytest.mark.parametrize("most", [GRID, 256])
def test_what_is_in_flight_in_a_round_is_bounded(most, monkeypatch):
    """X13: a rank sends no more than a limit in an exchange, and has no more than it of what it has read for others and received. Replicas receive nothing but what they need."""
    sent, came, groups, exchange = [], [], set(), ThreadCollectives.exchange

    def counted(self, parts, sizes, *, among=None, doing=""):
        sent.append(sum(len(part) for each in parts for part in each))
        came.append(sum(sizes))
        groups.add(among)
        return exchange(self, parts, sizes, among=among, doing=doing)

    monkeypatch.setattr(ThreadCollectives, "exchange", counted)
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(shared_reads, "_MESH_RANKS", most)
    values, mesh = {"w": noise(2048, 640)}, make_mesh((5,))
    store = saved(values, {"w": [[0]]}, make_mesh((2,)))
    check(loads(store, values, {"w": [[]]}, mesh)[0], values, {"w": [[]]}, mesh)
    assert max(sent) <= 1 << 20
    assert max(came) <= 1 << 20
    assert sum(sent) == sum(came) == 4 * size_of(values)
    assert groups == ({None} if most > 5 else {range(2), range(2, 5), range(0, 5, 2), range(1, 5, 2)})


@pytest.mark.parametrize(("mesh", "cuts"), [((3,), [[0]]), ((3,), COLUMNS), ((2, 2), [[], [0]])])
def test_what_a_rank_keeps_is_bounded(mesh, cuts, monkeypatch):
    """X13: of a round, and of what came before its turn. What has been read is dropped."""
    kept, do_round = [], shared_reads.SharedStore._do_round

    def noted(self):
        do_round(self)
        kept.append(sum(map(len, self._came.values())))

    monkeypatch.setattr(shared_reads.SharedStore, "_do_round", noted)
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 1 << 20)
    values = {name: noise(1500, 640) for name in "abc"} | {name: noise(3, 70) for name in "no"}
    mesh, cuts = make_mesh(mesh), {name: cuts if name in "abc" else [[]] for name in values}
    store = saved(values, {name: [[0]] if name in "abc" else [[]] for name in values}, make_mesh((3,)))
    outcomes, read = loads(store, values, cuts, mesh)
    check(outcomes, values, cuts, mesh)
    assert sum(read) == size_of(values)
    assert max(kept) <= 2 << 20


@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_that_change_on_their_way_to_a_rank_fail_the_load_on_all_and_name_the_file(rank, monkeypatch):
    """C07: also on the ranks to which it sent them, since no rank trusts another; no rank begins another round."""
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 1 << 20)
    values, mesh = {"a": noise(1024, 640), "w": noise(4096, 640)}, make_mesh((3,))
    store = saved(values, {name: [[]] for name in values}, make_mesh((1,)))
    damages = {rank: range(5000, values["a"].nbytes, PIECE_BYTES // 4)}
    outcomes, _ = loads(store, values, dict.fromkeys(values, COLUMNS), mesh, damages=damages)
    assert ["model-00000-of-00001" in str(each.error) for each in outcomes] == [True] * 3
    assert len({each.schedule for each in outcomes}) == 1
    assert sum(call.kind == "exchange" for call in outcomes[0].schedule) == 3


def test_bytes_that_change_between_ranks_fail_the_load_on_all_and_name_the_one_that_has_found_it(monkeypatch):
    """C07: it verifies what it receives, and the others begin no other round."""
    exchange = ThreadCollectives.exchange

    def changed(self, parts, sizes, **how):
        found = exchange(self, parts, sizes, **how)
        return [bytes(len(each)) for each in found] if self.rank == 1 else found

    monkeypatch.setattr(ThreadCollectives, "exchange", changed)
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 1 << 20)
    values, mesh = {"a": noise(1024, 640), "w": noise(4096, 640)}, make_mesh((3,))
    whole = {name: [[]] for name in values}
    outcomes, _ = loads(saved(values, whole, make_mesh((1,))), values, whole, mesh, step=1)
    assert [type(each.error) for each in outcomes] == [RankFailed, CheckpointDamaged, RankFailed]
    assert ["model-00000-of-00001" in str(each.error) for each in outcomes] == [True] * 3
    assert [each.error.rank for each in outcomes] == [1, 1, 1]
    assert len({each.schedule for each in outcomes}) == 1
    assert sum(call.kind == "exchange" for call in outcomes[0].schedule) == 3


def test_a_checkpoint_that_is_damaged_for_one_rank_is_passed_over_on_all():
    values, mesh, store = {"w": noise(2048, 640)}, make_mesh((3,)), MemoryStore()
    for step in (1, 2):
        save(state_of(values, {"w": [[]]}, make_mesh((1,)), 0, step), store)

    def loaded(world):
        mine = Slow(store, damages=range(5000, size_of(values), PIECE_BYTES) if world.rank == 2 else (), step=2)
        like = state_of(values, {"w": [[]]}, mesh, world.rank)
        return load(mine, like=like, collectives=world, policy={"world": "adapt"}).trainer.step

    assert run_threads(3, loaded) == [1, 1, 1]


@pytest.mark.parametrize("first", [0, 3 * PIECE_BYTES])
def test_a_rank_that_cannot_read_fails_the_load_on_all_in_the_same_round(first):
    """C07: the others name it, and what it could not do."""
    values, mesh = {"w": noise(4096, 640)}, make_mesh((3,))
    store, cuts = saved(values, {"w": [[]]}, make_mesh((1,))), {"w": [[]]}

    class Broken(Slow):
        def read_into(self, name, buffer, *, start=0):
            if start > first:
                raise TrainfoldError(name, expected="bytes", found="an error of the mount", fix="look at it")
            super().read_into(name, buffer, start=start)

    def loaded(world):
        mine = (Broken if world.rank == 1 else Slow)(store)
        return load(mine, like=state_of(values, cuts, mesh, world.rank), collectives=world, policy={"world": "adapt"})

    outcomes = thread_outcomes(3, loaded)
    assert ["an error of the mount" in str(each.error) for each in outcomes] == [True] * 3
    assert [each.error.rank for each in outcomes] == [1, 1, 1]
    assert len({len(each.schedule) for each in outcomes}) == 1


def test_ranks_share_only_if_all_of_them_say_that_the_store_is_shared():
    values, mesh = {"w": noise(400, 640)}, make_mesh((2,))
    store, cuts = saved(values, {"w": [[]]}, make_mesh((1,))), {"w": [[]]}

    def loaded(world):
        mine = Slow(store)
        mine.is_shared = world.rank == 0
        load(mine, like=state_of(values, cuts, mesh, world.rank), collectives=world, policy={"world": "adapt"})
        return mine.read_bytes

    assert run_threads(2, loaded) == [size_of(values)] * 2


@pytest.mark.parametrize(("mesh", "cuts", "named"), [((6,), [[]], 0), ((2, 3), [[1]], 3)])
def test_ranks_with_the_same_needs_name_them_once(mesh, cuts, named, monkeypatch):
    """N01: replicas compare digests, and name nothing; of two groups that are cut alike, one names what both need."""
    values, mesh, gather, told = {"w": noise(60, 9_000)}, make_mesh(mesh), ThreadCollectives.gather, []

    def noted(self, value, *, doing="", is_vote=False):
        told.extend([value] if doing == "name what it reads" else [])
        return gather(self, value, doing=doing, is_vote=is_vote)

    store = saved(values, {"w": [[]]}, make_mesh((1,)))
    monkeypatch.setattr(ThreadCollectives, "gather", noted)
    outcomes, read = loads(store, values, {"w": cuts}, mesh)
    check(outcomes, values, {"w": cuts}, mesh)
    assert sum(read) == size_of(values)
    assert sum(map(bool, told)) == named


def test_ranks_whose_needs_are_too_many_parts_read_alone_and_rank_0_logs_it(monkeypatch, caplog):
    """X13: who declared a shared store learns that it does not help."""
    values, mesh, cuts = {"w": noise(4096, 640)}, make_mesh((2,)), {"w": COLUMNS}
    store = saved(values, {"w": [[]]}, make_mesh((1,)))
    monkeypatch.setattr(shared_reads, "_SPANS_LIMIT", 0)
    outcomes, read = loads(store, values, cuts, mesh)
    check(outcomes, values, cuts, mesh)
    assert read == [size_of(values)] * 2
    assert [each.getMessage().partition(",")[0] for each in caplog.records] == ["each rank reads alone"] * 1


@pytest.mark.parametrize(("ranks", "exchanges"), [(3, 3), (5, 8)])
def test_a_rank_that_fails_in_any_call_fails_it_everywhere(ranks, exchanges, monkeypatch):
    """C07: no rank waits for it, and no rank goes on alone; nor in either hop of a grid."""
    values, mesh, cuts = {"w": noise(1024, 640)}, make_mesh((ranks,)), {"w": COLUMNS}
    store = saved(values, {"w": [[]]}, make_mesh((1,)))
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(shared_reads, "_MESH_RANKS", GRID)
    schedule = loads(store, values, cuts, mesh)[0][0].schedule
    kinds = [call.kind for call in schedule]
    assert kinds.count("exchange") == exchanges
    for index in range(kinds.index("exchange") - 3, len(kinds)):
        outcomes, _ = loads(store, values, cuts, mesh, fail_at=RankFault(1, index))
        for rank in {*range(ranks)} - {1}:
            assert type(outcomes[rank].error) is RankFailed
            assert outcomes[rank].error.rank == 1
            assert str(schedule[index]) in str(outcomes[rank].error)


def test_a_call_that_fails_on_one_rank_with_an_error_of_its_own_fails_it_everywhere(monkeypatch):
    """C07: collectives of a user may raise anything, and the checkpoint is not blamed for it."""
    exchange = ThreadCollectives.exchange

    def broken(self, parts, sizes, *, doing=""):
        if self.rank == 1:
            raise ConnectionError("the cable is out")
        return exchange(self, parts, sizes, doing=doing)

    monkeypatch.setattr(ThreadCollectives, "exchange", broken)
    values, mesh, cuts = {"w": noise(100, 640)}, make_mesh((3,)), {"w": [[]]}
    outcomes, _ = loads(saved(values, cuts, make_mesh((1,))), values, cuts, mesh)
    assert [type(each.error) for each in outcomes] == [RankFailed, ConnectionError, RankFailed]
    assert ["the cable is out" in str(each.error) for each in outcomes] == [True] * 3


@pytest.mark.parametrize("hop", [0, 1])
def test_an_error_of_its_own_in_either_hop_of_a_grid_fails_the_load_everywhere(hop, monkeypatch):
    """C07: the ranks of other rows and columns, too, which exchange nothing with that one."""
    exchange, calls = ThreadCollectives.exchange, []

    def broken(self, parts, sizes, *, among=None, doing=""):
        if self.rank == 1:
            calls.append(among)
            if len(calls) == hop + 1:
                raise ConnectionError("the cable is out")
        return exchange(self, parts, sizes, among=among, doing=doing)

    monkeypatch.setattr(ThreadCollectives, "exchange", broken)
    monkeypatch.setattr(shared_reads, "_MESH_RANKS", GRID)
    values, mesh, cuts = {"w": noise(1024, 640)}, make_mesh((5,)), {"w": [[]]}
    outcomes, _ = loads(saved(values, cuts, make_mesh((1,))), values, cuts, mesh)
    assert calls[hop] is not None
    assert [type(each.error) for each in outcomes] == [RankFailed, ConnectionError, *[RankFailed] * 3]
    assert all(each.error.rank == 1 for each in outcomes if each.rank != 1)
    assert len(calls) == hop + 1, "it makes no other call"


@pytest.mark.parametrize("where", ["while it reads for others", "between rounds"])
def test_a_rank_that_is_interrupted_makes_no_other_call_and_the_others_end(where, monkeypatch):
    """C07: Ctrl-C ends a process at once, so nothing is reported and nothing is voted: the others see that the rank has gone."""
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 1 << 20)
    values, mesh, cuts = {"w": noise(4096, 640)}, make_mesh((3,)), {"w": [[]]}
    store = saved(values, cuts, make_mesh((1,)))
    read_into = shared_reads.SharedStore.read_into

    def between(self, name, buffer, *, start=0):
        if self._ranks.rank == 1 and start > 2 * PIECE_BYTES:
            raise KeyboardInterrupt
        read_into(self, name, buffer, start=start)

    class Interrupted(Slow):
        def read_into(self, name, buffer, *, start=0):
            if start > 2 * PIECE_BYTES:
                raise KeyboardInterrupt
            super().read_into(name, buffer, start=start)

    if where == "between rounds":
        monkeypatch.setattr(shared_reads.SharedStore, "read_into", between)

    def loaded(world):
        mine = Interrupted if world.rank == 1 and where != "between rounds" else Slow
        like = state_of(values, cuts, mesh, world.rank)
        return load(mine(store), like=like, collectives=world, policy={"world": "adapt"})

    outcomes = thread_outcomes(3, loaded)
    assert [type(each.error) for each in outcomes] == [RankFailed, KeyboardInterrupt, RankFailed]
    assert [each.error.rank for each in outcomes if each.rank != 1] == [1, 1]
    assert outcomes[1].schedule == outcomes[0].schedule[:-1]
    assert outcomes[1].schedule[-1].kind == "exchange", "it comes to no vote about its error"


def load_columns(collectives, run, victim):
    values, mesh = {"w": noise(4096, 640)}, make_mesh((collectives.world_size,))
    wanted = state_of(values, {"w": COLUMNS}, mesh, collectives.rank)

    class Killed(Slow):
        def read_into(self, name, buffer, *, start=0):
            if collectives.rank == victim and start > 4 * PIECE_BYTES:
                os.kill(os.getpid(), signal.SIGKILL)
            super().read_into(name, buffer, start=start)

    like, store = (
        state_of({"w": torch.zeros_like(values["w"])}, {"w": COLUMNS}, mesh, collectives.rank),
        Killed(LocalStore(run)),
    )
    shared_reads.ROUND_BYTES, shared_reads._MESH_RANKS = 4 << 20, GRID
    found = load(store, like=like, collectives=collectives, policy={"world": "adapt"})
    is_same = torch.equal(found.model.params["w"].tensor, wanted.model.params["w"].tensor)
    return is_same, store.read_bytes, [list(each) for each in collectives._groups]


@pytest.mark.parametrize(
    ("ranks", "topology"), [(3, "mesh"), (4, "tree"), pytest.param(4, "mesh", marks=pytest.mark.long)]
)
def test_processes_share_as_threads_do_and_a_killed_one_is_named(ranks, topology, processes, tmp_path):
    """X03, C07: what a rank reads is at most 1.25 times what it needs; four ranks stand in a grid of two rows."""
    values, run = {"w": noise(4096, 640)}, str(tmp_path / "run")
    save(state_of(values, {"w": [[]]}, make_mesh((1,)), 0), run)
    how = {"timeout_secs": 60.0, "grace_secs": 0.5, "topology": topology}

    found = processes.run(ranks, load_columns, run, None, collectives=how)
    assert [is_same for is_same, _, _ in found] == [True] * ranks
    assert sum(read for _, read, _ in found) == size_of(values)
    assert max(read for _, read, _ in found) <= 1.25 * size_of(values) / ranks
    grid = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert [groups for _, _, groups in found] == (grid if ranks > GRID else [[]] * ranks)
    ended = processes.outcomes(ranks, load_columns, run, 1, collectives=how)
    assert [rank.code for rank in ended] == [1, -signal.SIGKILL, *[1] * (ranks - 2)]
    for rank in {*range(ranks)} - {1}:
        assert ended[rank].error == "RankFailed"
        assert "rank 1" in ended[rank].text


def test_a_local_store_says_whether_ranks_share_it(tmp_path):
    assert not LocalStore(tmp_path).is_shared
    assert LocalStore(tmp_path, is_shared=True).is_shared

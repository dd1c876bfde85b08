"""A tree of ranks that are processes: the contract of collectives, ranks that end or hang, and the sockets that it takes."""

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainfold.backends.ranks.processes.edges import connect
from trainfold.backends.ranks.torch_distributed import TorchCollectives
from trainfold.backends.runs.api import save
from trainfold.core.errors import InvalidArgument, RankFailed
from trainfold.core.layout.agreement.rank_tree import rank_tree
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties.contracts import check_collectives

PATIENT = {"timeout_secs": 60.0, "grace_secs": 10.0}
CHAIN = {"node_ranks": 1, "fan_out": 1}
PAIRS = {"node_ranks": 2, "fan_out": 2}


@pytest.mark.parametrize(
    ("world_size", "shape", "store"),
    [
        (1, "tree", "file"),
        (2, "tree", "file"),
        (3, CHAIN, "tcp"),
        (4, "tree", "tcp"),
        (7, PAIRS, "tcp"),
        (5, PAIRS, "file"),
    ],
)
def test_processes_in_a_tree_keep_the_contract(processes, world_size, shape, store):
    options = {**PATIENT, "topology": shape}
    check_collectives(
        lambda size, function: processes.run(size, function, collectives=options, store=store),
        world_sizes=(world_size,),
    )


# --- ranks that end or hang ------------------------------------------------------------------------------------------


def have_ended(processes):
    """Wait until these processes are gone, for a minute; whether they are."""
    for _ in range(1200):
        for each in list(processes):
            with suppress(ProcessLookupError):
                os.kill(each, 0)
                break
            processes.remove(each)
        if not processes:
            return True
        time.sleep(0.05)
    return False


def play(collectives, how, victim):
    pids = collectives.gather(os.getpid())
    pending = collectives.start_gather([collectives.rank])
    if collectives.rank == victim:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hangs":
            return have_ended([pid for rank, pid in enumerate(pids) if rank != victim])
        else:
            error = ValueError("its disk is full")
            collectives.fail(error)
            raise error
    try:
        collectives.gather("x" * 5000, doing="write its files", is_vote=True)
    except RankFailed as error:
        again = []
        for call in (lambda: collectives.broadcast(1), lambda: collectives.all_sum([torch.ones(3)])):
            try:
                call()
            except RankFailed as repeated:
                again.append(str(repeated) == str(error))
        return str(error), again
    pending.wait()
    return "went on"


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("how", "victim", "told"),
    [
        ("is killed", 2, "ended, hung, or busy elsewhere"),
        ("is killed", 5, "ended, hung, or busy elsewhere"),
        ("fails", 4, "ValueError: its disk is full"),
        ("hangs", 1, "it did not come to the next boundary within 0.4 s"),
    ],
)
def test_a_rank_of_a_tree_that_ends_or_hangs_is_named_by_all_others(processes, how, victim, told):
    """C07, X10: a leader, a leaf below one, another leader, and a leaf of the first node; numbers that were started before are not waited for either."""
    options = {"timeout_secs": 30.0, "vote_secs": 0.4 if how == "hangs" else 20.0, "grace_secs": 0.8, "topology": PAIRS}
    ended = processes.outcomes(6, play, how, victim, collectives=options, store="tcp", is_tidy=how == "hangs")
    others = [each.value for each in ended if each.rank != victim]
    assert len({text for text, _ in others}) == 1, others
    text = others[0][0]
    assert text.startswith(f"rank {victim}: expected every rank to take part, found")
    assert told.replace("come to the next boundary", "write its files") in text or told in text, text
    assert [again for _, again in others] == [[True] * 2] * 5
    if how == "hangs":
        assert ended[victim].value is True, "the others end, and do not wait for it"


def test_the_end_of_rank_0_which_is_the_root_and_hosts_the_store_is_heard(processes):
    ended = processes.outcomes(
        4, play, "is killed", 0, collectives={**PATIENT, "grace_secs": 0.5, "topology": PAIRS}, store="tcp"
    )
    for rank in (1, 2, 3):
        text, again = ended[rank].value
        assert "rank 0 unless a launcher has it" in text
        assert again == [True] * 2


def leave(collectives):
    pids = collectives.gather(os.getpid())
    if collectives.rank == 3:
        return have_ended(pids[:3])
    collectives.start_gather([1])
    return None


@pytest.mark.slow(4)
def test_a_rank_that_leaves_does_not_wait_for_numbers_that_no_rank_reads(processes):
    """A thread passes them on, and a process waits for its threads: a launcher must see that a rank has ended."""
    ended = processes.outcomes(4, leave, collectives={**PATIENT, "topology": PAIRS}, is_tidy=True)
    assert [rank.code for rank in ended] == [0] * 4
    assert ended[3].value is True, "the others end before this one does"


# --- what it takes ---------------------------------------------------------------------------------------------------


def sockets():
    """The sockets of this process, when those that only helped to connect are gone."""
    found, again = None, listed()
    while found != again:
        time.sleep(0.05)
        found, again = again, listed()
    return found


def listed():
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found.add(str(descriptor.readlink()))
    return {each for each in found if each.startswith("socket:")}


def sockets_of(shape):
    """Those that collectives take, when they are made, after every kind of agreement, and after a sum of floats."""
    before = sockets()
    topology = shape if isinstance(shape, str) else rank_tree(dist.get_world_size(), **shape)
    made = TorchCollectives(topology=topology, timeout_secs=60)
    found = [len(sockets() - before)]
    pending = made.start_gather([1])
    assert made.gather(made.rank) == list(range(made.world_size))
    assert made.broadcast("x" * 10_000) == "x" * 10_000
    assert made.all_sum([torch.tensor(1)])[0].item() == made.world_size
    made.barrier(timeout_secs=60)
    assert len(pending.wait()) == made.world_size
    found.append(len(sockets() - before))
    assert made.all_sum([torch.tensor(1.0)])[0].item() == made.world_size
    found.append(len(sockets() - before))
    made.barrier(timeout_secs=60)  # the sockets of a rank that has ended are closed on the others
    return found


@pytest.mark.slow(3)
def test_a_rank_of_a_tree_has_a_socket_for_each_neighbour_and_one_of_a_mesh_for_each_rank(processes):
    """C06: counted at 8 ranks. Both have one more, where others connect; a tree makes a mesh for the first sum of floats, and not before."""
    tree = rank_tree(8, node_ranks=4, fan_out=2)
    found = processes.run(8, sockets_of, {"node_ranks": 4, "fan_out": 2})
    assert (
        [first for first, _, _ in found]
        == [place.neighbours + 1 for place in tree.places()]
        == [5, 2, 2, 2, 5, 2, 2, 2]
    )
    assert [again for _, again, _ in found] == [first for first, _, _ in found]
    assert [with_mesh - first for first, _, with_mesh in found] == [8] * 8
    assert [first for first, _, _ in processes.run(8, sockets_of, "mesh")] == [8] * 8


class Counted(dist.Store):
    """A store that counts the requests of each thread."""

    def __init__(self):
        super().__init__()
        self.values, self.requests, self.changed = {}, Counter(), threading.Condition()

    def request(self, keys=()):
        self.requests[threading.current_thread().name] += 1
        assert self.changed.wait_for(lambda: all(key in self.values for key in keys), 30)

    def set(self, key, value):
        with self.changed:
            self.request()
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self.request([key])
            return self.values[key]

    def wait(self, keys, timeout=None):
        with self.changed:
            self.request(keys)


def requests_to_connect(size):
    """Those of each rank of a tree, and of each rank of a mesh; ranks are threads."""
    tree, found = rank_tree(size, node_ranks=4, fan_out=2), []
    for way in ("tree", "mesh"):
        store, made = Counted(), []

        def make(rank, way=way, store=store, made=made):
            if way == "tree":
                made.append(connect(dist, store, tree.place(rank), 30.0))
            else:
                made.append(dist.ProcessGroupGloo(dist.PrefixStore("mesh", store), rank, size, timedelta(seconds=30)))

        threads = [threading.Thread(target=make, args=(rank,), name=str(rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(made) == size
        found.append([store.requests[str(rank)] for rank in range(size)])
    return found


def test_a_tree_is_connected_by_five_requests_at_each_end_of_an_edge(processes):
    """C06: each rank of a mesh asks for each other one, so the ranks together make 2 N^2 requests before their first call."""
    ((tree, mesh),) = processes.run(1, requests_to_connect, 12)
    assert tree == [5 * place.neighbours for place in rank_tree(12, node_ranks=4, fan_out=2).places()]
    assert mesh == [2 * 12 + 1] * 12


def save_in_a_tree(collectives, run):
    state = TrainState(trainer=Progress(step=1), extra={"w": {str(i): torch.full((10,), float(i)) for i in range(8)}})
    copy = collectives.duplicate()
    del collectives
    return dict(save(state, run, collectives=copy).fingerprints)


def test_a_tree_saves_what_a_mesh_saves(processes, tmp_path):
    """V05: and its duplicate outlives it."""
    shapes = ("mesh", PAIRS)
    found = [
        processes.run(4, save_in_a_tree, str(tmp_path / str(i)), collectives={**PATIENT, "topology": shape})
        for i, shape in enumerate(shapes)
    ]
    assert found[0] == found[1]


def shape_by_default(is_given):
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo") if is_given else None
    made = TorchCollectives(group, timeout_secs=60)
    assert made.gather(made.rank) == list(range(made.world_size))
    return None if made._tree is None else str(made._tree)


@pytest.mark.slow(3)
def test_ranks_are_a_tree_by_default_where_they_are_more_than_8(processes):
    """C06: up to a node a mesh has no more sockets. A group that is given is a mesh already."""
    (found,) = set(processes.run(9, shape_by_default, False))
    assert found.startswith("9 ranks in 2 nodes of 8, fan-out 8")
    assert set(processes.run(8, shape_by_default, False)) == {None}
    assert set(processes.run(9, shape_by_default, True)) == {None}


def told_of(environment):
    os.environ.update(environment if dist.get_rank() == 0 else {"LOCAL_WORLD_SIZE": "7"})
    made = TorchCollectives(topology="tree", timeout_secs=60)
    try:
        TorchCollectives(topology=rank_tree(9))
    except InvalidArgument as error:
        return str(made._tree), error.where
    return None


@pytest.mark.parametrize(
    ("environment", "nodes"), [({"LOCAL_WORLD_SIZE": "2"}, "2 nodes of 2"), ({"LOCAL_WORLD_SIZE": "x"}, "1 nodes of 4")]
)
def test_rank_0_decides_on_the_tree_of_all(processes, environment, nodes):
    """C01: launchers may count nodes differently; ranks that took different trees would wait for each other."""
    for tree, refused in processes.run(4, told_of, environment):
        assert f"4 ranks in {nodes}" in tree
        assert refused == "TorchCollectives.topology"

"""Replicas are compared in the background: a bit that flips in one rank's memory is found and named, and nothing else is."""

import logging
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.adapters.fsdp2_cases import OPTIMIZERS, sharded
from kit.system.rank_refusals_cases import PATIENT, disagreements
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.loop.loop_data import LoopData
from trainfold.adapters.live.run_watch import RunWatch
from trainfold.adapters.manager import replica_watch
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.hold.hold import Hold
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.alike import held_digests
from trainfold.backends.runs.alike.held_digests import digests_job, to_compare
from trainfold.backends.runs.alike.replicas import copies_of
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, RanksDisagree, SaveFailed
from trainfold.core.save.replicas import Proof


def flip(tensor, *, bit=20):
    """Flip a bit around torch's version counter, as a cosmic ray does."""
    words = tensor.data.view(-1).view(torch.int32)
    words[words.numel() // 2] ^= 1 << bit


def alike(model):
    """The model with weights that do not come from the stream that threads share."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def train(world, store, *, flips=(), steps=10, every=4, finish=False, mode="sync", wrap=lambda model: model):
    """Train equal replicas; ``flips`` are (rank, step, which) of a bit that flips after that boundary. Returns the steps that were compared."""
    model = wrap(alike(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    with CheckpointManager(
        store, every=None, at_end=False, mode=mode, check_replicas=every, collectives=world
    ) as manager:
        while live.progress.step < steps:
            model(torch.full((2, 8), float(live.progress.step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=2)
            for rank, step, which in flips:
                if (rank, step) == (world.rank, live.progress.step):
                    weight = next(model.parameters())
                    flip(weight if which == "weight" else optimizer.state[weight]["exp_avg"])
            manager.step(live)
            if (check := manager._saves._replicas._check) is not None:
                check.job.wait()  # so that each comparison is read at the next boundary
        if finish:
            manager.step(live, is_last=True)
    return manager._saves._replicas._equal_at


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("which", ["weight", "slot"])
def test_a_bit_that_flips_in_one_ranks_memory_is_found_with_the_leaf_the_rank_and_the_step(world_size, which):
    """R07, X14: the comparison of step 8 finds what flipped before it, and names step 4 as the last one that was equal."""
    flips = [(1, 6 if which == "weight" else 8, which)]
    outcomes = thread_outcomes(world_size, lambda world: train(world, MemoryStore(), flips=flips))
    text = disagreements(outcomes)
    leaf = "model.params['0.weight']" if which == "weight" else "optimizer.slots['0.weight']['exp_avg']"
    assert leaf in text
    others = {2: "rank 0", 3: "ranks 0 and 2", 4: "ranks 0, 2 and 3"}[world_size]
    if world_size == 2:
        assert "other bits on rank 0 than on rank 1, and no majority" in text
    else:
        assert f"other bits on rank 1 than on {others}" in text
    assert "the same bits at step 8" in text
    assert "of step 4 or before" in text
    assert {outcome.error.step for outcome in outcomes} == {10}, "the boundary where it was read"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_equal_replicas_are_found_equal(mode):
    assert run_threads(3, lambda world: train(world, MemoryStore(), mode=mode)) == [8] * 3


def test_what_flips_after_the_last_comparison_is_found_at_the_last_boundary_only_if_one_is_under_way():
    """R07: the boundary with ``is_last`` waits for the comparison that is under way, and saves nothing that it refutes."""
    flips = [(0, 8, "weight")]
    text = disagreements(
        thread_outcomes(2, lambda world: train(world, MemoryStore(), flips=flips, steps=8, finish=True))
    )
    assert "at step 8" in text
    assert run_threads(2, lambda world: train(world, MemoryStore(), steps=8, finish=True)) == [8, 8]


def train_ddp(collectives, folder):
    return train(collectives, folder, flips=[(2, 4, "weight")], every=2, wrap=nn.parallel.DistributedDataParallel)


@pytest.mark.slow(1)
def test_a_flipped_bit_is_found_among_real_ranks_under_ddp(processes, tmp_path):
    """R07, X14."""
    for rank in processes.outcomes(3, train_ddp, str(tmp_path), collectives=PATIENT):
        assert rank.error == "RanksDisagree"
        leaf = "model.params['0.weight']: expected the same bits at step 4 on ranks 0, 1 and 2"
        assert f"{leaf}, found other bits on rank 2 than on ranks 0 and 1" in rank.text
        assert "of step 2 or before" in rank.text


def train_hsdp(collectives, folder):
    """On a mesh of 2 x 2 the ranks 0 and 2 hold the same rows, and the ranks 1 and 3 the others."""
    model = sharded(4, mesh_shape=(2, 2))
    model.eval()
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    live = attach(model, optimizer)
    with CheckpointManager(folder, every=None, at_end=False, check_replicas=2, collectives=collectives) as manager:
        while live.progress.step < 8:
            model(torch.ones(4, 6) * live.progress.step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance(samples=4)
            if collectives.rank == 3 and live.progress.step == 4:
                flip(model.second.weight.to_local())
            manager.step(live)
            if (check := manager._saves._replicas._check) is not None:
                check.job.wait()


@pytest.mark.long
@pytest.mark.slow(5)
def test_a_bit_that_flips_in_a_part_is_found_by_the_ranks_that_hold_that_part(processes, tmp_path):
    """R07: with hybrid sharding two ranks hold each part, so both are named."""
    for rank in processes.outcomes(4, train_hsdp, str(tmp_path), collectives=PATIENT):
        assert rank.error == "RanksDisagree", rank.text + rank.printed
        assert "model.params['second.weight']: expected the same bits at step 4 on ranks 1 and 3" in rank.text
        assert "other bits on rank 1 than on rank 3, and no majority" in rank.text


# --- no torn digest is an alarm ---------------------------------------------------------------------------------------


class Interrupted:
    """A hold whose owner comes in between, after so many pieces."""

    def __init__(self, hold, at, action):
        self._hold, self._at, self._action = hold, at, action

    def __getattr__(self, name):
        return getattr(self._hold, name)

    def _count(self):
        self._at -= 1
        if self._at == 0:
            owner = threading.Thread(target=self._action)
            owner.start()
            owner.join()

    def pieces(self, name, size):
        self._count()
        for piece in self._hold.pieces(name, 64):
            yield piece
            self._count()


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4), at=st.integers(1, 16), is_announced=st.booleans())
def test_digests_are_of_the_moment_of_the_hold_or_there_are_none(sizes, at, is_announced):
    """R07, law: an announced update at any moment changes no digest; one that is not announced ends the comparison."""
    found = {
        "model": {f"w{index}": torch.arange(float(size)) for index, size in enumerate(sizes)},
        "known": {"x": "text"},
    }
    wanted = copies_of(found, proof=Proof("tensor"))
    leaves = {("model", path): leaf for path, leaf in found["model"].items()}
    hold, came = Hold(leaves), []

    def update():
        came.append(True)
        if is_announced:
            hold.protect()
        for leaf in leaves.values():
            leaf.add_(1)

    job = digests_job(to_compare(found, {"model": "model", "known": "known"}), Interrupted(hold, at, update))
    job.start()
    job.wait()
    if is_announced or not came:
        assert job.result == wanted
    else:
        assert isinstance(job.failure, SaveFailed)


def torn(world, store, gate, write):
    """Rank 0 reads its leaves before both write to them, and rank 1 after that."""
    model = alike(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    with CheckpointManager(store, every=None, at_end=False, check_replicas=1, collectives=world) as manager:
        live.advance(samples=1)
        manager.step(live)
        check = manager._saves._replicas._check
        if world.rank == 0:
            check.job.wait()
        world.gather(None)
        write(model.weight, optimizer)
        if world.rank == 1:
            gate.set()
        check.job.wait()
        for _ in range(2):  # the first one sends what is known now, and the second one reads it
            live.advance(samples=1)
            manager.step(live)
        return check.job.failure, manager._saves._replicas._equal_at


WRITES = {
    "announced": lambda weight, optimizer: optimizer.step(),
    "seen": lambda weight, optimizer: weight.detach().add_(1),
    "unseen": lambda weight, optimizer: weight.data.add_(1),
}


@pytest.mark.parametrize("kind", WRITES)
def test_no_write_between_two_boundaries_is_an_alarm(monkeypatch, caplog, kind):
    """R07: a step copies what is not read yet. A write that only a version counter shows ends the comparison; after one around it the ranks look again."""
    gate, gated, of_rank = threading.Event(), [], threading.local()
    digest, hold_of = held_digests._digest, replica_watch.Hold

    def held(leaves, **options):
        hold = hold_of(leaves, **options)
        if getattr(of_rank, "value", 0) == 1:
            gated.append(hold)
        return hold

    def late(hold, leaf):
        if hold in gated:
            gate.wait(60)
        return digest(hold, leaf)

    def work(world):
        of_rank.value = world.rank
        return torn(world, store, gate, WRITES[kind])

    monkeypatch.setattr(held_digests, "_digest", late)
    monkeypatch.setattr(replica_watch, "Hold", held)
    monkeypatch.setitem(Hold.__init__.__kwdefaults__, "check", False)  # as users have it
    store = MemoryStore()
    with caplog.at_level(logging.INFO, "trainfold"):
        (_, equal), (failure, _) = run_threads(2, work)
    assert (equal == 1) == (kind == "announced")
    if kind == "seen":
        assert isinstance(failure, SaveFailed)
        assert "the replicas of step 1 are not compared" in caplog.text
    else:
        assert failure is None
        text = "model.params['weight'] differed between ranks at step 1, and is equal now"
        assert (text in caplog.text) == (kind == "unseen")


def test_a_comparison_is_not_taken_for_a_save(monkeypatch):
    """R07: the search for state that no component saves goes by saves, and so does what is known of a loop's place in an epoch."""
    looks = []
    monkeypatch.setattr(RunWatch, "check_saved", lambda *_: looks.append("state"))
    monkeypatch.setattr(LoopData, "was_saved", lambda _: looks.append("data"))
    store = MemoryStore()

    def program(world):
        model = alike(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
        live = attach(model, optimizer, loader=loader)
        with CheckpointManager(store, every=None, at_end=False, check_replicas=1, collectives=world) as manager:
            for batch in live.batches(epochs=1):
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                live.advance()
                manager.step(live)
                if (check := manager._saves._replicas._check) is not None:
                    check.job.wait()
            return manager._saves._replicas._equal_at

    assert all(run_threads(2, program)), "they have compared"
    assert looks == []


def test_a_restore_gives_up_the_comparison_under_way():
    store = MemoryStore()

    def work(world):
        live = attach(alike(nn.Linear(2, 2)))
        with CheckpointManager(store, every=1, check_replicas="none", collectives=world) as manager:
            live.advance(samples=1)
            manager.step(live)
        with CheckpointManager(store, every=None, at_end=False, check_replicas=1, collectives=world) as manager:
            manager.restore(live)
            for _ in range(2):
                live.advance(samples=1)
                manager.step(live)
            manager.restore(live)
            live.advance(samples=1)
            manager.step(live)
            return live.progress.step

    assert run_threads(2, work) == [2, 2]


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "ful", None])
def test_what_is_neither_a_level_nor_a_number_of_steps_is_refused(value):
    with pytest.raises(
        InvalidArgument, match=r"check_replicas.*'none' or 'quick' or 'tensor' or 'full', or an int >= 1"
    ):
        CheckpointManager(MemoryStore(), check_replicas=value)


def test_ranks_that_compare_at_other_steps_are_refused():
    def work(world):
        CheckpointManager(MemoryStore(), check_replicas=5 + world.rank, collectives=world).close()

    for outcome in thread_outcomes(2, work):
        assert isinstance(outcome.error, RanksDisagree)
        assert "check_replicas" in str(outcome.error)

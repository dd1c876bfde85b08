"""Ranks as processes: the contract of collectives, and the error on other ranks if one raises, dies, hangs or leaves."""

import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainfold.backends.ranks.in_process import SingleProcess, run_threads
from trainfold.backends.ranks.process_group import checked_group
from trainfold.backends.ranks.processes.mesh import head_bytes
from trainfold.backends.ranks.torch_distributed import TorchCollectives
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.local import LocalStore
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import InvalidArgument, RankFailed
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.world import Collectives
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step
from trainfold.properties.contracts import ContractBroken, check_collectives

PATIENT = {"timeout_secs": 60.0, "grace_secs": 10.0}
HASTY = {"timeout_secs": 30.0, "grace_secs": 2.0}
SOURCES = Path(__file__).resolve().parents[3]
ALLOWED = {
    "backends/ranks/torch_distributed.py",
    "core/save/replicas.py",  # the call stands in a text
    "adapters/parallel/like_gradients.py",  # the same
    "adapters/parallel/torch_parallelism.py",  # of the training, in its group and thread
    "adapters/parallel/pipelines/pipeline.py",  # the same, over the stages
    "adapters/parallel/pipelines/stage_norm.py",
    "adapters/parallel/interrupted.py",  # before the training goes on after an error, in the group of DDP
    "adapters/sharded/whole.py",  # the call stands in a text
}
GONE = "ended, hung, or busy elsewhere"


# --- the contract ----------------------------------------------------------------------------------------------------


def test_a_world_of_one_and_threads_keep_the_contract():
    check_collectives(lambda _, function: [function(SingleProcess())], world_sizes=(1,))
    check_collectives(run_threads, world_sizes=(1, 2, 3, 4, 7))


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_processes_keep_the_contract(processes, world_size, store):
    check_collectives(
        lambda size, function: processes.run(size, function, collectives=PATIENT, store=store),
        world_sizes=(world_size,),
    )


class Wrapped:
    """Collectives of threads, of which one thing is broken."""

    def __init__(self, inner, **broken):
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        for name in ("all_sum", "broadcast", "gather", "start_gather", "exchange", "barrier", "fail", "duplicate"):
            setattr(self, name, broken.get(name, getattr(inner, name)))


def backwards(inner):
    """Adds in an order that depends on the rank."""

    def all_sum(tensors):
        rows = [
            inner.all_sum([t if rank == inner.rank else torch.zeros_like(t) for t in tensors])
            for rank in range(inner.world_size)
        ]
        turned = rows[inner.rank :] + rows[: inner.rank]
        return [sum(same[1:], same[0]) for same in zip(*turned, strict=True)]

    return Wrapped(inner, all_sum=all_sum)


def through_float64(inner):
    return Wrapped(
        inner,
        all_sum=lambda tensors: [
            s.to(t.dtype) for s, t in zip(inner.all_sum([t.double() for t in tensors]), tensors, strict=True)
        ],
    )


def in_place(inner):
    def all_sum(tensors):
        return [t.copy_(s) for t, s in zip(tensors, inner.all_sum(tensors), strict=True)]

    return Wrapped(inner, all_sum=all_sum)


def out_of_order(inner):
    return Wrapped(inner, gather=lambda value, **how: inner.gather(value, **how)[::-1])


def all_to_all(inner):
    return Wrapped(inner, exchange=lambda parts, sizes, **how: inner.exchange(parts[::-1], sizes, **how))


def any_source(inner):
    return Wrapped(
        inner, broadcast=lambda value, source=0, **how: inner.broadcast(value, source=source % inner.world_size, **how)
    )


def silent(inner):
    return Wrapped(inner, fail=lambda error: inner.fail(RuntimeError("something")))


@pytest.mark.parametrize(
    ("liar", "rule"),
    [
        (backwards, "added in rank order"),
        (through_float64, "integers are summed exactly"),
        (in_place, "leaves its terms alone"),
        (out_of_order, "gathered in rank order"),
        (all_to_all, "the part that every other one has for it"),
        (any_source, "a source outside"),
        (silent, "is named on every other rank"),
    ],
)
def test_collectives_that_lie_are_caught_by_rule(liar, rule):
    with pytest.raises(ContractBroken, match=rule):
        check_collectives(
            lambda size, function: run_threads(size, lambda inner: function(liar(inner))), world_sizes=(3,)
        )


def sum_on_the_device(collectives):
    given = [
        torch.full((5,), float(collectives.rank + 1), device="cuda"),
        torch.tensor(2**53 + 1, device="cuda"),
        torch.ones(2),
    ]
    totals = collectives.all_sum(given)
    return [(total.device.type, total.tolist()) for total in totals], given[0].tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sums_of_tensors_on_a_device_are_on_it(processes):
    sums = [("cuda", [3.0] * 5), ("cuda", 2**54 + 2), ("cpu", [2.0] * 2)]
    assert processes.run(2, sum_on_the_device, collectives=PATIENT) == [(sums, [1.0] * 5), (sums, [2.0] * 5)]


def duplicate_again_and_again(collectives):
    kept = []
    for number in range(3):
        copy = collectives.duplicate()
        assert copy.gather(copy.rank + number) == [number, number + 1]
        if collectives.rank == 1:
            kept.append(copy)
        del copy
    return len(kept)


def test_copies_are_made_whichever_ranks_have_let_go_of_earlier_ones(processes):
    """C07: torch named a group by the number of groups in the process: a second async manager hung, or could not connect."""
    assert processes.run(2, duplicate_again_and_again, collectives=HASTY) == [0, 3]


# --- ranks that do not come ------------------------------------------------------------------------------------------


def work_until(collectives, how, rank):
    collectives.gather("all are here")
    if collectives.rank == rank:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError(f"a bug of rank {rank}")
        if how == "says that it fails":
            error = ValueError(f"the disk of rank {rank}")
            collectives.fail(error)
            raise error
        if how == "gives what cannot travel":
            collectives.gather(object())
        if how == "leaves":
            return None
    start = time.monotonic()
    try:
        for _ in range(3):
            collectives.all_sum([torch.ones(1000), torch.ones(3, dtype=torch.int64)])
    except RankFailed as error:
        again = []
        for call in (lambda: collectives.gather(1), lambda: collectives.barrier(timeout_secs=5)):
            try:
                call()
            except RankFailed as repeated:
                again.append(str(repeated) == str(error))
        return str(error), again, time.monotonic() - start
    return "went on"


@pytest.mark.slow(2)
@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("is killed", GONE),
        pytest.param("raises", GONE, marks=pytest.mark.long),
        ("says that it fails", "ValueError: the disk of rank 1"),
        ("gives what cannot travel", "InvalidArgument: what one rank gives to others: .*builtins.object"),
        pytest.param("leaves", GONE, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_ends_is_named_by_all_others_at_once(processes, how, told, store):
    """C07: in the middle of a series of all_sum, with the message that it left, or by a roll call."""
    ended = processes.outcomes(4, work_until, how, 1, collectives=HASTY, store=store)
    for rank in (0, 2, 3):
        text, again, secs = ended[rank].value
        assert text.startswith("rank 1: expected every rank to take part, found")
        assert pytest.approx(0, abs=HASTY["timeout_secs"] / 2) == secs, "the peer's end is seen, not waited for"
        assert again == [True, True]
        assert re.search(told, text), text
    assert len({ended[rank].value[0] for rank in (0, 2, 3)}) == 1


@pytest.mark.parametrize("how", ["is killed", "says that it fails"])
def test_the_end_of_the_rank_that_hosts_the_store_is_heard_too(processes, how):
    ended = processes.outcomes(3, work_until, how, 0, collectives=HASTY, store="tcp")
    for rank in (1, 2):
        text, again, _ = ended[rank].value
        assert ("the disk of rank 0" if how == "says that it fails" else "rank 0 unless a launcher has it") in text
        assert again == [True, True]


def hang(collectives, call, secs):
    collectives.gather("all are here")
    if collectives.rank == 1:
        time.sleep(secs)
    try:
        if call == "all_sum":
            collectives.all_sum([torch.ones(3)])
        elif call == "vote":
            collectives.gather(True, doing="commit the checkpoint", is_vote=True)
        elif call == "row":
            collectives.start_gather([1, 2], doing="come to the next boundary").wait()
        elif call == "duplicate":
            collectives.duplicate()
        else:
            collectives.barrier(timeout_secs=0.3)
    except RankFailed as error:
        return str(error)
    return "went on"


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("call", "timeout_secs", "said"),
    [
        ("all_sum", 0.5, "not all ranks came to all_sum(float32[3]) in time"),
        ("vote", 60.0, "it did not commit the checkpoint within 0.4 s"),
        pytest.param(
            "barrier", 60.0, "not all ranks came to barrier() in time, which is 0.3 s", marks=pytest.mark.long
        ),
        pytest.param("row", 0.5, "it did not come to the next boundary within 0.5 s", marks=pytest.mark.long),
        pytest.param("duplicate", 0.5, "it did not make a group for saves within 0.5 s", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_is_named_after_the_deadline_and_hears_of_it_when_it_comes(
    processes, call, timeout_secs, said
):
    """C07, X10: the error names the rank and what it was doing; a vote has a shorter deadline than what moves bytes."""
    deadlines = {"timeout_secs": timeout_secs, "vote_secs": 0.4, "grace_secs": 0.5}
    told = processes.run(3, hang, call, 3.0, collectives=deadlines)
    assert len(set(told)) == 1
    assert told[0].startswith("rank 1: expected every rank to take part, found no sign of it within 0.5 s")
    assert said in told[0]


@pytest.mark.slow(4)
def test_who_has_given_up_ends_and_does_not_wait_for_the_one_that_hangs(processes):
    """A launcher must see that a rank has ended before it ends the others."""
    ended = processes.outcomes(
        3, hang, "barrier", 4.0, collectives={"timeout_secs": 60.0, "grace_secs": 0.5}, is_tidy=True
    )
    assert [rank.code for rank in ended] == [0, 0, 0]
    assert max(ended[0].secs, ended[2].secs) < ended[1].secs


def test_ranks_that_are_busy_for_less_than_the_deadline_are_waited_for(processes):
    assert processes.run(3, hang, "all_sum", 1.0, collectives=PATIENT) == ["went on"] * 3


def raise_all(collectives):
    collectives.gather(1)
    if collectives.rank == 2:
        error = ValueError("lost")
        collectives.fail(error)
        raise error
    collectives.barrier(timeout_secs=30)


def test_a_world_that_failed_ends_with_tracebacks_and_no_crash(processes):
    """Python and torch shut down during an exchange: there is no abort, and each rank prints why it ended."""
    for rank in processes.outcomes(3, raise_all, collectives=PATIENT, is_tidy=True):
        assert rank.code == 1, rank.printed
        assert "lost" in rank.printed


# --- groups ----------------------------------------------------------------------------------------------------------


def make_in_groups():
    evens = dist.new_group([0, 2], backend="gloo")
    told = []
    try:
        given = TorchCollectives(evens, timeout_secs=30)
        told = [given.rank, given.gather(dist.get_rank()), given.all_sum([torch.tensor(1)])[0].item()]
        told += [given.broadcast(dist.get_rank(), source=1)]
    except InvalidArgument as error:
        told = [error.where]
    both = TorchCollectives(timeout_secs=30), TorchCollectives(dist.group.WORLD, timeout_secs=30)
    return told, [each.gather(dist.get_rank()) for each in both], isinstance(both[0], Collectives)


def test_a_group_that_is_given_has_its_own_ranks(processes):
    zero, one, two = processes.run(3, make_in_groups)
    assert zero == ([0, [0, 2], 2, 2], [[0, 1, 2]] * 2, True)
    assert two == ([1, [0, 2], 2, 2], [[0, 1, 2]] * 2, True)
    assert one == (["TorchCollectives.group"], [[0, 1, 2]] * 2, True)


def make_but_for_one():
    if dist.get_rank() == 1:
        return None
    try:
        TorchCollectives(timeout_secs=0.5)
    except RankFailed as error:
        return str(error)


def test_a_rank_that_does_not_make_its_collectives_is_not_waited_for_for_ever(processes):
    zero, _, two = processes.run(3, make_but_for_one)
    for told in (zero, two):
        assert told.startswith("rank 1: expected every rank to make its TorchCollectives, found no call in time: ")


def fail_one_of_two():
    first, second = TorchCollectives(timeout_secs=30), TorchCollectives(timeout_secs=30)
    if first.rank == 1:
        first.fail(ValueError("only the first"))
    try:
        first.barrier(timeout_secs=30)
    except RankFailed:
        return second.gather(first.rank)


def test_a_failure_ends_its_own_collectives_and_no_others(processes):
    assert processes.run(2, fail_one_of_two) == [[0, 1]] * 2


def test_without_torch_distributed_the_error_says_how_to_start_it():
    with pytest.raises(InvalidArgument, match=r"init_process_group\(\"gloo\"\)"):
        TorchCollectives()
    with pytest.raises(InvalidArgument, match="timeout_secs > 0"):
        TorchCollectives(timeout_secs=0)


class CpuOnly:
    """A group that refuses every tensor that is not in CPU memory, and counts those that it takes."""

    def __init__(self, group):
        self.group, self.taken = group, 0

    def __getattr__(self, name):
        return getattr(self.group, name)

    def look(self, value):
        if isinstance(value, torch.Tensor):
            assert value.device.type == "cpu", value.device
            self.taken += 1
        for each in value if isinstance(value, list | tuple) else ():
            self.look(each)

    def allgather(self, *arguments):
        self.look(arguments)
        return self.group.allgather(*arguments)

    def broadcast(self, *arguments):
        self.look(arguments)
        return self.group.broadcast(*arguments)

    def allreduce(self, *arguments):
        self.look(arguments)
        return self.group.allreduce(*arguments)

    def alltoall_base(self, *arguments):
        self.look(arguments)
        return self.group.alltoall_base(*arguments)


class Received:
    """A group that counts the bytes that this rank receives."""

    def __init__(self, group, rank):
        self.group, self.rank, self.count, self.exchanges = group, rank, 0, 0

    def __getattr__(self, name):
        return getattr(self.group, name)

    def allgather(self, rows, *arguments):
        self.exchanges += 1
        self.count += sum(row.nbytes for row in rows[0])
        return self.group.allgather(rows, *arguments)

    def broadcast(self, tensors, options):
        self.exchanges += 1
        self.count += tensors[0].nbytes
        return self.group.broadcast(tensors, options)


def broadcast_a_root(collectives, length):
    collectives._exchange._group = Received(collectives._exchange._group, collectives.rank)
    assert len(collectives.broadcast(b"x" * length if collectives.rank == 1 else None, source=1)) == length
    return collectives._exchange._group.count


def test_a_rank_receives_a_broadcast_value_once_however_many_ranks_there_are(processes):
    """A manifest of 10 MB cost each of N ranks N x 10 MB."""
    for world_size in (2, 4):
        for received in processes.run(world_size, broadcast_a_root, 1_000_000, collectives=PATIENT):
            assert 1_000_000 < received < 1_000_000 + 4200 * world_size


def call_everything(collectives):
    groups = []
    for each in (collectives, collectives.duplicate()):
        assert "gloo" in type(each._exchange._group).__name__.lower() or "gloo" in dist.get_backend_config(
            each._exchange._group
        )
        each._exchange._group = CpuOnly(each._exchange._group)
        groups.append(each._exchange._group)
        pending = each.start_gather([1])
        each.all_sum([torch.ones(3), torch.ones(2, dtype=torch.int64)])
        each.all_sum([torch.ones(2, dtype=torch.int64)])
        each.broadcast("x" * 9000)
        each.gather([1])
        each.barrier(timeout_secs=30)
        pending.wait()
    return [group.taken for group in groups]


def test_no_call_gives_torch_a_tensor_of_a_device_or_a_group_of_another_backend(processes):
    """P26: NCCL's watchdog ends a job whose save is slow; so nothing of a save goes through it."""
    first, second = processes.run(2, call_everything, collectives=PATIENT)
    assert first == second
    assert first[0] == first[1] > 0


def test_a_group_without_a_backend_for_the_cpu_is_refused():
    class Nccl:
        """What torch.distributed says of a group made for NCCL alone."""

        @staticmethod
        def get_rank(group):
            return 0

        @staticmethod
        def get_backend_config(group):
            return "cuda:nccl"

    with pytest.raises(InvalidArgument, match=r"a group with a CPU backend, found cuda:nccl"):
        checked_group(Nccl, "group")


def test_only_one_room_calls_torch_distributed():
    """P26: a collective call elsewhere would be in the group of the training, and without a deadline."""
    found = {
        str(path.relative_to(SOURCES))
        for room in ("adapters", "backends", "core", "properties")
        for path in (SOURCES / room).rglob("*.py")
        if re.search(
            r"dist(ributed)?\.(all_|reduce|broadcast|gather|barrier|scatter|send|recv|new_group|monitored)",
            path.read_text(),
        )
    }
    assert found <= ALLOWED


# --- what they are for -----------------------------------------------------------------------------------------------


def loss_fn(model, batch):
    return Loss(sum=(model(batch) ** 2).sum(), weight=len(batch))


def train_and_save(collectives, run):
    model = torch.nn.utils.skip_init(torch.nn.Linear, 8, 4)
    for parameter in model.parameters():  # threads share the default generator
        parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    sgd = optimizer(torch.optim.AdamW, lr=1e-2)
    state = init_state(model, sgd)
    step = make_step(model, loss_fn, sgd, collectives=collectives)
    for seed in range(3):
        batch = torch.randn(10, 8, generator=torch.Generator().manual_seed(seed))
        state, _ = step(state, shard_of(batch, collectives.rank, collectives.world_size))
    saved = save(state, run, collectives=collectives)
    again = load(run, like=init_state(model, sgd), collectives=collectives)
    return fingerprint(state) == fingerprint(again), dict(saved.fingerprints)


def exchanges_of_a_save(collectives, run):
    collectives._exchange._group = Received(collectives._exchange._group, collectives.rank)
    weights = {"w": torch.zeros(64, 8)}
    save(TrainState(trainer=Progress(step=1), extra={"ema": weights, "ema2": weights}), run, collectives=collectives)
    return collectives._exchange._group.exchanges


def test_a_save_of_processes_is_four_exchanges(processes, tmp_path):
    """V05: each exchange costs all ranks a turn of the others' processor: what they have, that they have planned and the head, what they wrote, the commit."""
    assert processes.run(2, exchanges_of_a_save, str(tmp_path / "run"), collectives=PATIENT) == [4, 4]


def test_what_a_rank_receives_to_agree_on_a_call_is_bounded():
    found = [head_bytes(size) for size in (2, 256, 512, 1000, 16_384)]
    assert found == [4096, 4096, 2048, 1048, 512]


def test_processes_train_and_save_as_threads_do(processes, tmp_path):
    """The steps, the checkpoint and the loaded state have the same bits, with processes and with threads."""
    threads = run_threads(3, lambda collectives: train_and_save(collectives, str(tmp_path / "threads")))
    real = processes.run(3, train_and_save, str(tmp_path / "processes"), collectives=PATIENT)
    assert threads == real
    assert all(same for same, _ in real)
    assert len(LocalStore(tmp_path / "processes").list()) == 2


def files_after(collectives, count, topology):
    """The file descriptors of a process after it has made many collectives, as a loop with frequent evaluations does."""
    found = []
    gc.disable()  # a group is released with its collectives, and not when the collector comes
    for _ in range(count):
        more = TorchCollectives(**PATIENT, topology=topology)
        assert more.gather(more.rank) == list(range(more.world_size))
        assert more.start_gather([1]).wait() == [(1,)] * more.world_size
        found.append(len(list(Path("/proc/self/fd").iterdir())))
    assert collectives.gather(1) == [1] * collectives.world_size
    return found


@pytest.mark.parametrize("topology", ["mesh", "tree"])
def test_collectives_made_anew_for_each_evaluation_use_up_nothing(processes, topology):
    for found in processes.run(2, files_after, 8, topology, collectives=PATIENT):
        assert found[-1] == found[0]


def slow(collectives):
    if collectives.rank == 1:
        time.sleep(4)
    return collectives.gather(collectives.rank)


@pytest.mark.slow(4)
def test_a_rank_that_is_late_is_named_and_the_fix_is_more_time(processes):
    """A share that takes longer than the ranks' timeout is not a network failure."""
    for ended in processes.outcomes(3, slow, collectives={"timeout_secs": 1.0, "grace_secs": 1.0}):
        assert ended.error == "RankFailed"
        assert "rank 1" in ended.text, ended.text
        assert "in time" in ended.text or "no sign" in ended.text, ended.text
        assert "timeout_secs" in ended.text, ended.text

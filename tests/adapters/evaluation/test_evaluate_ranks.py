"""Evaluations by several processes give the bits of one process; if one process fails, all of them raise."""

import os
import re
import signal
import subprocess
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

import trainfold
from trainfold import metrics as M
from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.core.data.eval_cursor import eval_batches, make_eval_cursor
from trainfold.core.errors import RankFailed

pytestmark = pytest.mark.slow(0.5)

PATIENT = {"timeout_secs": 60.0, "grace_secs": 10.0}
HASTY = {"timeout_secs": 30.0, "grace_secs": 2.0}
LENGTH = 41
SUITE = {
    "loss": M.Ratio(),
    "ppl": M.Perplexity(),
    "smallest": M.Min(),
    "largest": M.Max(),
    "spread": M.Variance(),
    "positions": M.PositionAccuracy(),
    "acc_len": M.AcceptanceLength(),
    "only rank 0 knows": M.Sum(),
    "not known": M.Ratio(),
}


def samples():
    """Floats from subnormal to large, whose sum depends on the order, and the number of positions of each."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-140, 30, (LENGTH,), generator=generator)
    return torch.ldexp(torch.randn(LENGTH, generator=generator), exponents), torch.arange(LENGTH) % 7 + 1


def fetch(positions):
    """A batch is as wide as its longest sample, so shapes differ."""
    values, lengths = samples()
    mine = torch.tensor(list(positions))
    return {"ids": mine, "values": values[mine], "lengths": lengths[mine], "width": int(lengths[mine].max())}


def forward(batch):
    values = batch["values"]
    there = torch.arange(batch["width"]) < batch["lengths"][:, None]
    hits = there & (batch["ids"][:, None] % 3 != torch.arange(batch["width"]))
    told = dict.fromkeys(("smallest", "largest", "spread"), values)
    told |= dict.fromkeys(("loss", "ppl"), (values, len(values)))
    told |= dict.fromkeys(("positions", "acc_len"), (hits, there))
    return told | {"only rank 0 knows": values[batch["ids"] == 0]}


def bits(evaluation):
    """Each result, to the bit."""
    return {
        name: [None if x is None else x.hex() for x in value] if isinstance(value, list) else value.hex()
        for name, value in evaluation.items()
    }


def at_once():
    return bits(evaluate(forward, [fetch(range(LENGTH))], SUITE))


# --- the same bits ---------------------------------------------------------------------------------------------------


def evaluate_all(collectives, sizes):
    """By positions in samples; then by shares of any kind: one rank with nothing, others with batches of other sizes."""
    found = []
    for size in sizes:
        cursor = make_eval_cursor(LENGTH, global_batch_size=size)
        batches = eval_batches(cursor, fetch, collectives=collectives)
        found.append(evaluate(forward, batches, SUITE, collectives=collectives))
    empty = collectives.world_size - 1
    having = [rank for rank in range(collectives.world_size) if rank != empty]
    mine = [] if collectives.rank == empty else list(range(LENGTH))[having.index(collectives.rank) :: len(having)]
    step = 2 * collectives.rank + 1
    mine = [fetch(mine[start : start + step]) for start in range(0, len(mine), step)]
    found.append(evaluate(forward, mine, SUITE, collectives=collectives))
    nothing = evaluate(forward, [], SUITE, collectives=collectives)
    return [bits(each) for each in found], [each.complete for each in found], (dict(nothing), nothing.batches)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_real_ranks_get_the_bits_of_one_process_on_every_rank(processes, world_size):
    """Q01, Q03, Q04, Q09: ranks with no data, other shapes, fewer batches; zero batches anywhere are an empty result."""
    sizes = [1, 5, 16, LENGTH]
    wanted = at_once()
    assert "not known" not in wanted, "a ratio without a denominator is absent, not 0.0"
    assert len(wanted) == len(SUITE) - 1
    for found, complete, nothing in processes.run(world_size, evaluate_all, sizes, collectives=PATIENT):
        assert found == [wanted] * (len(sizes) + 1)
        assert complete == [True] * (len(sizes) + 1)
        assert nothing == ({}, 0)


def evaluate_in_chunks(collectives):
    """A real model: its kernels round a row differently in another batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 96), torch.nn.GELU(), torch.nn.Linear(96, 11))
    data, suite = torch.randn(LENGTH * 3, 37), {"loss": M.Ratio()}

    def nll(batch):
        return {"loss": (model(batch).logsumexp(1), len(batch))}

    cursor = make_eval_cursor(len(data), global_batch_size=32)
    batches = eval_batches(cursor, lambda mine: data[mine.start : mine.stop], collectives=collectives, chunk=16)
    alone = [
        evaluate(nll, data.split(size), suite, chunk=16, collectives=trainfold.SingleProcess()) for size in (1, 7, 64)
    ]
    return bits(evaluate(nll, batches, suite, collectives=collectives, chunk=16)), *map(bits, alone)


def test_real_ranks_with_a_real_model_get_the_bits_of_one_in_chunks(processes):
    """P16: three processes, one without a share, against one process with other batches."""
    (found, *others) = processes.run(3, evaluate_in_chunks, collectives=PATIENT)
    assert [set(map(str, each)) for each in (found, *others)] == [{str(found[0])}] * 3


def evaluate_part(collectives, run, size, limit, step):
    """Continue from the last checkpoint, evaluate a number of steps, save."""
    state = trainfold.TrainState(trainer=trainfold.states.make_progress(step=step))
    index, tally = 0, None
    if (
        step
    ):  # accumulators grow with the data, so that no template has their shapes: what it lacks is taken as it was saved
        state = trainfold.load(run, like=state, collectives=collectives)
        index, tally = state.extra["evaluation"]["cursor"].next_index, state.extra["evaluation"]["tally"]
    cursor = make_eval_cursor(LENGTH, global_batch_size=size, next_index=index)
    batches = eval_batches(cursor, fetch, collectives=collectives, limit=limit)
    found = evaluate(forward, batches, SUITE, collectives=collectives, start=tally)
    after = {"evaluation": {"cursor": batches.after, "tally": found.tally}}
    trainfold.save(
        state.evolve(trainer=trainfold.states.make_progress(step=step + 1), extra=after), run, collectives=collectives
    )
    return bits(found), found.complete, batches.after.next_index


def test_an_evaluation_goes_on_in_another_world_from_a_checkpoint(processes, tmp_path):
    """Q01: two parts by three ranks and by two, with other batches, the second from what the first saved."""
    run = str(tmp_path / "run")
    first = processes.run(3, evaluate_part, run, 4, 5, 0, collectives=PATIENT)
    assert {(complete, index) for _, complete, index in first} == {(False, 20)}
    second = processes.run(2, evaluate_part, run, 3, None, 1, collectives=PATIENT)
    assert second == [(at_once(), True, LENGTH)] * 2


# --- a forward that itself communicates ------------------------------------------------------------------------------


def together(batch):
    """As the layers of a sharded model do: waits for the forward of every other rank."""
    count = torch.ones(())
    dist.all_reduce(count)
    assert count == dist.get_world_size()
    together.calls += 1
    return forward(batch)


def evaluate_in_step(collectives, size):
    cursor = make_eval_cursor(LENGTH, global_batch_size=size)
    batches = eval_batches(cursor, fetch, collectives=collectives)
    together.calls = 0
    found = evaluate(together, batches, SUITE, collectives=collectives, steps=cursor.steps)
    return bits(found), together.calls, len(list(batches)), found.batches


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("size", [2, 10])
def test_uneven_shares_do_not_hang_a_forward_that_communicates(processes, world_size, size):
    """Q05: every rank makes the same number of calls; the extra calls of a rank without a batch are not counted."""
    found = processes.run(world_size, evaluate_in_step, size, collectives=PATIENT)
    steps = -(-LENGTH // size)
    assert {calls for _, calls, _, _ in found} == {steps}
    assert [each for each, *_ in found] == [at_once()] * world_size
    own = [batches for _, _, batches, _ in found]
    assert min(own) < steps, "the case is there: a rank has no share of the last step"
    assert {counted for *_, counted in found} == {sum(own)}


# --- a launcher ------------------------------------------------------------------------------------------------------


def launched(warm_python, script, ranks):
    """What a script prints under torchrun."""
    done = subprocess.run(
        warm_python.torchrun(["--standalone", f"--nproc-per-node={ranks}"], script),
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow(3)
def test_the_script_of_the_page_runs_under_torchrun_and_prints_the_rounded_fraction(warm_python, root, tmp_path):
    page = (root / "docs" / "how-to" / "evaluate-on-several-ranks.md").read_text()
    (text,) = re.findall(r"<!--- skip: next -->\n\n```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "evaluate.py"
    script.write_text(text)
    terms = [Fraction(term) for term in torch.linspace(0, 1, 1001).tolist()]
    mean = float(sum(terms) / len(terms))
    assert launched(warm_python, script, 3) == f"{{'mean': {mean}}} {mean.hex()}\n"


# --- ranks that fail -------------------------------------------------------------------------------------------------


def fail_midway(collectives, how, communicates):
    cursor = make_eval_cursor(LENGTH, global_batch_size=6)
    batches = eval_batches(cursor, fetch, collectives=collectives)

    def failing(batch):
        if collectives.rank == 1 and 20 in range(int(batch["ids"][0]) - 6, int(batch["ids"][-1])):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad sample")
        return together(batch) if communicates else forward(batch)

    together.calls = 0
    model = torch.nn.Linear(1, 1)
    try:
        evaluate(
            failing,
            batches,
            SUITE,
            collectives=collectives,
            steps=cursor.steps if communicates else None,
            modules=[model],
        )
    except Exception as error:  # noqa: BLE001  # the test judges it
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())]), model.training
    return "went on"


@pytest.mark.parametrize("communicates", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_that_raises_midway_fails_all_and_is_named(processes, world_size, communicates):
    """Q03: no rank waits for it, and each is put back as it was."""
    ended = processes.outcomes(world_size, fail_midway, "raises", communicates, collectives=HASTY)
    for rank, end in enumerate(ended):
        kind, text, training = end.value
        assert training
        if rank == 1:
            assert (kind, text) == ("ValueError", "a bad sample")
        else:
            assert kind == RankFailed.__name__ or communicates
            assert re.search("rank 1: expected .* ValueError: a bad sample", text), text


@pytest.mark.parametrize("communicates", [False, True])
def test_a_rank_that_is_killed_midway_is_named_by_all_others(processes, communicates):
    ended = processes.outcomes(3, fail_midway, "killed", communicates, collectives=HASTY)
    assert ended[1].code == -signal.SIGKILL
    for rank in (0, 2):
        kind, text, _ = ended[rank].value
        assert kind == RankFailed.__name__ or communicates
        assert "rank 1: expected every rank to take part, found no sign of it" in text, text


class CountedGroup:
    """A process group whose exchanges are counted, with the bytes of the integers that are reduced."""

    def __init__(self, group):
        self.group, self.calls = group, []

    def allgather(self, *arguments):
        self.calls.append("allgather")
        return self.group.allgather(*arguments)

    def allreduce(self, tensors, options):
        self.calls.append(f"allreduce of {sum(tensor.nbytes for tensor in tensors)} bytes")
        return self.group.allreduce(tensors, options)


def counted(collectives):
    group = collectives._exchange._group = CountedGroup(collectives._exchange._group)
    cursor = make_eval_cursor(LENGTH, global_batch_size=8)
    evaluate(forward, eval_batches(cursor, fetch, collectives=collectives), SUITE, collectives=collectives)
    return group.calls


def test_an_evaluation_is_one_all_reduce_of_integers_and_five_exchanges_of_words(processes):
    """Q03: the same on every rank, however many batches there are; a gather of much takes two, a sum first makes sure of the call."""
    (calls, *others) = processes.run(3, counted, collectives=PATIENT)
    assert others == [calls] * 2
    *words, numbers = calls
    assert words == ["allgather"] * 5
    size_bytes = int(re.fullmatch(r"allreduce of (\d+) bytes", numbers).group(1))
    assert 0 < size_bytes <= 64 * 1024


class BySource:
    """Hits of each source, by its name."""

    def zero(self):
        return {}

    def observe(self, acc, name, hits):
        return {**acc, name: {"hits": acc.get(name, {"hits": 0})["hits"] + hits.sum()}}

    def merge(self, one, other):
        return {key: {"hits": sum(acc[key]["hits"] for acc in (one, other) if key in acc)} for key in {**one, **other}}

    def result(self, acc):
        return {key: int(each["hits"]) for key, each in sorted(acc.items())} or None


def by_source(collectives):
    data = [("wiki", torch.tensor([3])), ("code", torch.tensor([5]))]
    mine = data[collectives.rank : collectives.rank + 1]  # rank 2 has none
    return dict(evaluate(lambda batch: {"hits": batch}, mine, {"hits": BySource()}, collectives=collectives))


def test_keys_that_only_one_rank_has_seen_stay_its_own(processes):
    """Q03: the structure of a rank's accumulators travels."""
    assert processes.run(3, by_source, collectives=PATIENT) == [{"hits": {"code": 5, "wiki": 3}}] * 3

"""torchmetrics in our suites: states pass through int64, ranks merge in rank order, and some results stay inexact."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from trainfold import metrics as M
from trainfold.adapters.bridges.torchmetrics import TorchMetric
from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, UnsupportedLeaf
from trainfold.core.evaluate.tensor_packing import pack, unpack
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import contracts, laws

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def bits(accumulator):
    return [(leaf.dtype, leaf.tolist()) for leaf in tree.leaves(accumulator)]


# --- tensors as int64 ------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """Any bits, NaN payloads included, in any shape, also without elements and without dimensions."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


@given(one=st.lists(tensors(), max_size=3), other=st.lists(tensors(), max_size=3))
def test_tensors_go_through_int64_and_come_back_to_the_bit(one, other):
    """And the vectors of two lists, concatenated, are those of the lists concatenated."""
    header, words = (torch.cat(pair) for pair in zip(pack(one), pack(other), strict=True))
    assert header.dtype == words.dtype == torch.int64
    back = unpack(header, words)
    for before, after in zip([*one, *other], back, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert bytes(before.contiguous().reshape(-1).view(torch.uint8)) == bytes(after.reshape(-1).view(torch.uint8))


def test_neither_form_shares_memory_with_the_other():
    tensor = torch.tensor([1, 2])
    header, words = pack([tensor])
    tensor += 1
    (back,) = unpack(header, words)
    back += 10
    assert words.tolist() == [1, 2]


def test_a_strided_view_is_packed_by_its_values():
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(unpack(*pack([whole.T[1:3]]))[0], whole.T[1:3])
    assert torch.equal(unpack(*pack([torch.tensor([1j]).conj()]))[0], torch.tensor([-1j]))


@pytest.mark.parametrize(
    ("header", "words"),
    [([99, 0], [0]), ([-1, 0], [0]), ([8], []), ([8, 1], [1]), ([8, 1, 4], [1]), ([8, 1, -1], []), ([8, -1], [1]),
     ([], [1]), ([8, 1, 1], [1, 2]), ([8, 1, 2**62], [])],
)  # fmt: skip
def test_vectors_that_no_tensor_has_are_refused(header, words):
    with pytest.raises(UnsupportedLeaf, match="expected a header and the words that it describes"):
        unpack(torch.tensor(header, dtype=torch.int64), torch.tensor(words, dtype=torch.int64))


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.uint16)])
def test_a_tensor_without_an_int64_form_is_refused_by_name(tensor):
    with pytest.raises(UnsupportedLeaf, match="seen"):
        pack([tensor], "seen")


# --- the same as torchmetrics ----------------------------------------------------------------------------------------


def classes(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, 3, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def binary(size, seed):
    preds, target = classes(size, seed)
    return preds[:, 0], (target == 0).long()


def reals(size, seed):
    preds, target = classes(size, seed)
    return preds[:, 0], target.float()


KINDS = {
    "sums of counts": (lambda: MulticlassAccuracy(num_classes=3), classes),
    "sums of a matrix": (lambda: MulticlassConfusionMatrix(num_classes=3), classes),
    "f1": (lambda: MulticlassF1Score(num_classes=3, average="none"), classes),
    "sums of floats": (torchmetrics.MeanSquaredError, reals),
    "thresholds": (lambda: BinaryAUROC(thresholds=5), binary),
    "cat": (BinaryAUROC, binary),
    "curves": (BinaryPrecisionRecallCurve, binary),
    "cat of values": (torchmetrics.CatMetric, lambda size, seed: (reals(size, seed)[0],)),
    "largest": (torchmetrics.MaxMetric, lambda size, seed: (reals(size, seed)[0],)),
    "smallest": (torchmetrics.MinMetric, lambda size, seed: (reals(size, seed)[0],)),
}


def plain(value):
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_gets_what_torchmetrics_computes(kind):
    make, batch = KINDS[kind]
    metric, theirs = TorchMetric(make), make()
    acc = metric.zero()
    for seed, size in enumerate([4, 1, 7]):
        acc = metric.observe(acc, *batch(size, seed))
        theirs.update(*batch(size, seed))
        assert metric.result(acc) == plain(theirs.compute())
    assert {leaf.dtype for leaf in tree.leaves(acc)} == {torch.int64}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_get_what_torchmetrics_merges_without_a_difference_between_ranks(kind):
    """One rank has no data; the reference is one torchmetrics instance per rank, with the states joined in rank order."""
    make, batch = KINDS[kind]
    metric = TorchMetric(make)
    sizes = [[4, 1], [], [7]]

    def forward(seed_and_size):
        return {"it": batch(*seed_and_size)}

    def work(world):
        share = [(size, 10 * world.rank + index) for index, size in enumerate(sizes[world.rank])]
        return evaluate(forward, share, {"it": metric}, collectives=world)

    outcomes = thread_outcomes(3, work)
    results = [outcome.value for outcome in outcomes]
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert len({outcome.schedule for outcome in outcomes}) == 1
    assert results[0] == results[1] == results[2]
    theirs = [make() for _ in sizes]
    for rank, each in enumerate(theirs):
        for index, size in enumerate(sizes[rank]):
            each.update(*batch(size, 10 * rank + index))
    assert results[0]["it"] == plain(joined(theirs[0], theirs[2]).compute())


def joined(one, other):
    """What torchmetrics' own synchronisation makes of two ranks: their states stacked or concatenated, and reduced."""
    for name, how in one._reductions.items():
        mine, more = getattr(one, name), getattr(other, name)
        setattr(one, name, [*mine, *more] if isinstance(mine, list) else how(torch.stack([mine, more])))
    return one


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_given_is_changed(kind):
    make, batch = KINDS[kind]
    metric, given = TorchMetric(make), batch(5, 0)
    before = copy.deepcopy(given)
    acc = metric.observe(metric.zero(), *given)
    kept, zero = bits(acc), bits(metric.zero())
    given[0].add_(1)  # nor is anything kept by reference
    more = metric.observe(acc, *batch(3, 1))
    metric.merge(acc, more)
    metric.result(acc)
    assert bits(acc) == kept
    assert bits(metric.zero()) == zero
    given[0].sub_(1)
    assert all(torch.equal(old, new) for old, new in zip(before[1:], given[1:], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_is_neutral_and_merging_is_associative_up_to_the_rounding_of_the_states(kind):
    make, batch = KINDS[kind]
    metric = TorchMetric(make)
    a, b, c = (metric.observe(metric.zero(), *batch(size, size)) for size in (2, 3, 4))
    assert bits(metric.merge(metric.zero(), a)) == bits(metric.merge(a, metric.zero())) == bits(a)
    left, right = metric.merge(metric.merge(a, b), c), metric.merge(a, metric.merge(b, c))
    if kind == "sums of floats":
        assert metric.result(left) == pytest.approx(metric.result(right))
    else:
        assert bits(left) == bits(right)


def test_what_saw_nothing_adds_nothing_whatever_its_default_is():
    """A state with the default 5 is 5 too high for each rank with data, as in torchmetrics, but not for ranks without."""
    metric = TorchMetric(lambda: Own(torch.tensor(5.0), "sum"))
    acc = metric.observe(metric.zero(), torch.tensor(1.0))
    assert bits(metric.merge(metric.zero(), acc)) == bits(metric.merge(acc, metric.zero())) == bits(acc)
    assert metric.result(acc) == 6.0


def test_a_metric_that_was_never_updated_has_no_result():
    """Neither 0.0 nor a warning, and absent from the evaluation."""
    metric = TorchMetric(torchmetrics.MeanSquaredError)
    assert metric.result(metric.zero()) is None
    assert metric.result(metric.merge(metric.zero(), metric.zero())) is None
    assert evaluate(lambda batch: {}, [1], {"it": metric}) == {}


def test_an_accumulator_can_be_saved_in_the_middle_and_gone_on_from():
    """The states of a list and of tensors through a checkpoint, and the rest of the data after it."""
    metric = TorchMetric(BinaryAUROC)
    half = metric.observe(metric.zero(), *binary(5, 0))
    store = MemoryStore()
    save(TrainState(trainer=Progress(step=1), extra={"evaluation": half}), store)
    again = load(store, like=TrainState(trainer=Progress(), extra={"evaluation": half})).extra["evaluation"]
    assert bits(again) == bits(half)
    assert metric.result(metric.observe(again, *binary(4, 1))) == metric.result(metric.observe(half, *binary(4, 1)))


# torchmetrics looks at values while it updates, and leaves out or compares what is NaN.
THEIRS = ("no device is waited for", "nan is not swallowed")
COUNTING = {
    "confusion": (lambda: TorchMetric(lambda: MulticlassConfusionMatrix(num_classes=3)), classes),
    "accuracy": (lambda: TorchMetric(lambda: MulticlassAccuracy(num_classes=3)), classes),
    "thresholds": (lambda: TorchMetric(lambda: BinaryAUROC(thresholds=5)), binary),
    "largest": (lambda: TorchMetric(torchmetrics.MaxMetric), KINDS["largest"][1]),
}


@pytest.mark.parametrize("kind", COUNTING)
def test_what_is_counted_does_not_depend_on_batches_or_ranks(kind):
    """What torchmetrics keeps in integers (or only compares) keeps the laws of our own metrics, to the bit."""
    make, batch = COUNTING[kind]
    laws.batch_invariant(make(), batch(20, 0), max_examples=20)
    contracts.check_metric(make, [batch(size, size) for size in (4, 1, 6)], except_for=THEIRS)


def test_an_empty_batch_is_none_at_all():
    metric = TorchMetric(torchmetrics.MeanSquaredError)
    acc = metric.observe(metric.zero(), torch.zeros(0), torch.zeros(0))
    assert metric.result(acc) is None
    full = metric.observe(acc, torch.ones(2), torch.zeros(2))
    assert bits(metric.observe(full, torch.zeros(0), torch.zeros(0))) == bits(full)


# --- what it cannot give ---------------------------------------------------------------------------------------------


def test_a_float32_state_depends_on_the_batch_size_where_our_own_metric_does_not():
    """2**24 and then 64 ones: one by one, each is rounded away. The docstring warns of it; the figures are here."""
    values = torch.tensor([2.0**24, *[1.0] * 64])

    def measured(size):
        return evaluate(
            lambda batch: {"theirs": batch, "ours": batch},
            values.split(size),
            {"theirs": TorchMetric(torchmetrics.SumMetric), "ours": M.Sum()},
        )

    assert {size: measured(size)["theirs"] for size in (1, 65)} == {1: 16777216.0, 65: 16777280.0}
    assert {measured(size)["ours"] for size in (1, 7, 65)} == {16777280.0}


def test_the_laws_find_a_float32_sum_out():
    """The law of our metrics fails, with a counterexample."""
    values = torch.tensor([2.0**24, *[1.0] * 4])
    with pytest.raises(laws.LawBroken):
        laws.batch_invariant(TorchMetric(torchmetrics.SumMetric), values)
    with pytest.raises(contracts.ContractBroken):
        contracts.check_metric(lambda: TorchMetric(torchmetrics.CatMetric), list(values.split(2)))


def test_a_cat_state_has_the_order_of_the_ranks():
    metric = TorchMetric(torchmetrics.CatMetric)
    one, other = (metric.observe(metric.zero(), torch.tensor([value])) for value in (1.0, 2.0))
    assert metric.result(metric.merge(one, other)) == [1.0, 2.0]
    assert metric.result(metric.merge(other, one)) == [2.0, 1.0]


# --- what is refused -------------------------------------------------------------------------------------------------


class Own(torchmetrics.Metric):
    """A metric whose one state is as the test wants it."""

    def __init__(self, default, reduction):
        super().__init__()
        self.add_state("seen", default=default, dist_reduce_fx=reduction)

    def update(self, value):
        if isinstance(self.seen, list):
            self.seen.append(value)
        else:
            self.seen += value

    def compute(self):
        return self.seen


@pytest.mark.parametrize(
    ("default", "reduction", "said"),
    [
        (torch.tensor(0.0), "mean", "mean for a Tensor"),
        (torch.tensor(0.0), None, "None for a Tensor"),
        (torch.tensor(0.0), lambda stacked: stacked.sum(0), "<lambda> for a Tensor"),
        (torch.tensor([0.0]), "cat", "cat for a Tensor"),
        ([], "sum", "sum for a list"),
    ],
)
def test_a_state_that_two_ranks_cannot_merge_is_refused_when_the_metric_is_made(default, reduction, said):
    with pytest.raises(InvalidArgument, match=f"the state 'seen': .*found {said}; keep a sum and a count"):
        TorchMetric(lambda: Own(default, reduction))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()),
        lambda: torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(),
        lambda: torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()]),
        torchmetrics.PearsonCorrCoef,
        lambda: torch.nn.Linear(1, 1),
        lambda: None,
    ],
)
def test_what_holds_other_metrics_or_is_none_is_refused_when_it_is_made(make):
    with pytest.raises(InvalidArgument, match="TorchMetric"):
        TorchMetric(make)


def test_a_list_without_a_reduction_keeps_its_tensors_apart():
    """As torchmetrics gathers it: one list with the tensors of all ranks, whatever their shapes."""
    metric = TorchMetric(lambda: Own([], None))
    one = metric.observe(metric.zero(), torch.zeros(2, 2))
    other = metric.observe(metric.zero(), torch.ones(3))
    assert metric.result(metric.merge(one, other)) == [[[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0, 1.0]]


def test_a_state_of_something_else_than_tensors_is_refused_by_name():
    metric = TorchMetric(lambda: Own([], None))
    with pytest.raises(InvalidArgument, match=r"TorchMetric\.seen: expected a state of tensors, found 'text'"):
        metric.observe(metric.zero(), "text")


def test_states_of_other_shapes_on_other_ranks_are_refused_and_not_broadcast():
    metric = TorchMetric(lambda: Own(torch.zeros(1), "sum"))
    one = {**metric.zero(), "seen": torch.tensor(1)}
    other = {"seen": torch.tensor(1), "states": {"seen": pack([torch.zeros(3)])}}
    with pytest.raises(InvalidArgument, match="the shape"):
        metric.merge(one, other)


class Fails(torchmetrics.Metric):
    """An update that fails in the middle, and leaves something else in its state than a list."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, value):
        self.seen.append(value)
        if value.isnan().any():
            self.seen = torch.cat(self.seen)
            raise ValueError("a NaN")

    def compute(self):
        return torch.cat(self.seen)


def test_an_update_that_fails_leaves_no_trace():
    metric = TorchMetric(Fails)
    acc = metric.observe(metric.zero(), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="a NaN"):
        metric.observe(acc, torch.tensor([math.nan]))
    assert metric.result(acc) == [1.0, 2.0]
    assert metric.result(metric.observe(metric.zero(), torch.tensor([3.0, 4.0]))) == [3.0, 4.0]


# --- in a program ----------------------------------------------------------------------------------------------------


def test_torchmetrics_own_synchronisation_is_off():
    """Only our schedule communicates, also if a process group exists."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a collective call of torchmetrics")

    metric = TorchMetric(
        lambda: torchmetrics.MeanSquaredError(distributed_available_fn=lambda: True, dist_sync_fn=refuse)
    )
    assert metric.result(metric.observe(metric.zero(), torch.ones(2), torch.zeros(2))) == 1.0


def test_ranks_that_are_threads_share_one_metric():
    metric = TorchMetric(BinaryAUROC)
    alone = [metric.result(metric.observe(metric.zero(), *binary(50, rank))) for rank in range(4)]
    assert run_threads(4, lambda world: metric.result(metric.observe(metric.zero(), *binary(50, world.rank)))) == alone


def test_its_text_is_the_same_in_every_process_and_tells_settings_apart():
    """Ranks compare what they measure by it."""
    first, again = (TorchMetric(lambda: BinaryAUROC(max_fpr=0.5)) for _ in range(2))
    assert repr(first) == repr(again) != repr(TorchMetric(BinaryAUROC))
    assert "0x" not in repr(first)


def test_it_can_be_copied():
    metric = TorchMetric(torchmetrics.MeanSquaredError)
    assert copy.deepcopy(metric) == metric == TorchMetric(torchmetrics.MeanSquaredError)
    assert metric != TorchMetric(torchmetrics.MeanAbsoluteError)


def test_torchmetrics_is_imported_by_nobody_but_its_user():
    code = "import sys, trainfold.adapters.bridges.torchmetrics; print('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_metric_of_the_users_own_is_not_touched():
    """With ``lambda: mine`` the metric keeps what it has seen, also if two threads both make it."""
    mine = torchmetrics.MeanSquaredError()
    mine.update(torch.ones(2), torch.zeros(2))
    metric = TorchMetric(lambda: mine)
    assert metric.result(metric.observe(metric.zero(), torch.zeros(2), torch.zeros(2))) == 0.0
    assert mine.update_count == 1
    assert mine.compute() == 1.0
    assert mine.sync_on_compute


def measured_in_a_process(world):
    """An evaluation with a process group of torch at hand, which torchmetrics would use by itself; rank 1 has no data."""
    metric = TorchMetric(BinaryAUROC)
    share = [] if world.rank == 1 else [(4, world.rank), (3, 10 + world.rank)]
    found = evaluate(lambda batch: {"it": binary(*batch)}, share, {"it": metric}, collectives=world)
    return torch.distributed.is_initialized(), float(found["it"]).hex(), found.batches


def test_processes_measure_the_same_bits(processes):
    told = processes.run(3, measured_in_a_process, collectives={})
    threads = run_threads(3, measured_in_a_process)
    assert told == [(True, *threads[0][1:])] * 3

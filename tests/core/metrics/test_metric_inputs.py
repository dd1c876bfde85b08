"""Blocks, pinned memory, and outputs or arguments that a metric refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.core.metrics_cases import EDGES, QS, MostElements, examples, result_of

from trainfold import metrics as M
from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics import counts
from trainfold.core.metrics.counts import add_counts, beside
from trainfold.properties.metrics.accumulators import difference_of


@pytest.mark.parametrize(
    ("metric", "other"),
    [
        (M.F1(3), M.F1(5)),
        (M.Confusion(5), M.Confusion(3)),
        (M.Histogram((0, 1, 2)), M.Histogram((0, 1))),
        (M.Quantiles((0, 1), 0.5), M.Quantiles((0, 1, 2), 0.5)),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_what_another_metric_has_seen_is_refused(metric, other):
    mine, theirs = metric.zero(), other.zero()
    values = torch.zeros(2, dtype=torch.int64)
    outputs = (values,) if hasattr(metric, "edges") else (values, values)
    for doing in (
        lambda: metric.merge(mine, theirs),
        lambda: metric.merge(theirs, mine),
        lambda: metric.merge(theirs, theirs),
        lambda: metric.observe(theirs, *outputs),
        lambda: metric.result(theirs),
    ):
        with pytest.raises(InvalidArgument, match=f"{type(metric).__name__}.*expected an accumulator with counts"):
            doing()


def test_an_infinity_over_nothing_is_not_lost():
    """A finite sum over 0 is absent; a non-finite one was an error of the run and stays visible."""
    for nothing in (0, torch.zeros(3), torch.zeros(2, dtype=torch.bool)):
        assert result_of(M.Ratio(), 1.0, nothing) is None
        assert result_of(M.Ratio(), math.inf, nothing) == math.inf
        assert result_of(M.Ratio(), -math.inf, nothing) == -math.inf
        assert math.isnan(result_of(M.Ratio(), math.nan, nothing))
        assert result_of(M.Perplexity(), math.inf, nothing) == math.inf


BLOCKWISE = [M.Variance(), M.Min(), M.Max(), M.Histogram(EDGES), M.Quantiles(EDGES, QS)]


@pytest.mark.parametrize("metric", BLOCKWISE, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_large_batches_are_taken_block_by_block(metric, dtype):
    """For any memory layout; temporary memory does not grow with the batch."""
    values = (torch.randn(12, 3, 50_001, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[..., :-1]
    with MostElements() as seen:
        acc = metric.observe(metric.zero(), values)
    assert seen.most <= counts.BLOCK * (
        6 if type(metric) is M.Variance else 1
    )  # an integer has three parts and six products
    wanted = metric.zero()
    for part in values.reshape(-1).split(99_999):
        wanted = metric.observe(wanted, part)
    assert difference_of(acc, wanted) is None


@given(st.data())
@examples(100)
def test_blocks_are_the_rows_in_order(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(math.prod(shape)).view(shape)
    for dim in range(len(shape)):
        if data.draw(st.booleans()):
            tensor = tensor.transpose(dim, -1)
        if shape[dim] and data.draw(st.booleans()):
            tensor = tensor.narrow(dim, 0, max(0, tensor.shape[dim] - 1))
    keep, size = data.draw(st.integers(0, len(shape))), data.draw(st.integers(1, 20))
    found = list(counts.blocks_of(tensor, size, keep=keep))
    tail = tensor.shape[tensor.dim() - keep :]
    rows = tensor.reshape(math.prod(tensor.shape[: tensor.dim() - keep]), *tail)
    assert torch.equal(torch.cat(found), rows)
    assert all(len(block) <= size and block.shape[1:] == tail for block in found)


def test_pinned_memory_is_copied_before_a_device_reads_it(monkeypatch):
    """A loader refills its pinned buffers, so a delayed transfer must not send the new contents."""
    copies = []

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            copies.append(str(function))
            return function(*args, **(kwargs or {}))

    pageable, there = torch.ones(3), torch.ones(3, device="meta")
    for is_pinned in (False, True):
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, now=is_pinned: now)
        copies.clear()
        with Copies():
            beside(pageable, there)
            beside(there, pageable)
        order = ["aten.clone.default"] * is_pinned + ["aten._to_copy.default"]
        assert copies == 2 * order


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_buffer_may_be_refilled_at_once():
    there = torch.zeros(1 << 22, dtype=torch.int64, device="cuda")
    buffer = torch.ones(1 << 22, dtype=torch.int64).pin_memory()
    torch.cuda._sleep(200_000_000)
    total = add_counts(there, buffer)
    buffer.fill_(7)
    assert int(total.sum()) == 1 << 22


@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40))
@examples(40)
def test_a_histogram_is_that_of_numpy(values):
    edges = (-4.0, -1.0, 0.0, 0.5, 4.0)
    found = result_of(M.Histogram(edges), torch.tensor(values))
    assert found["counts"] == np.histogram(np.array(values, dtype=np.float64), edges)[0].tolist()


@given(st.lists(st.floats(0, 8, width=32), min_size=1, max_size=40), st.integers(0, 10).map(lambda tenth: tenth / 10))
@examples(60)
def test_a_quantile_lies_in_the_bin_of_the_true_one(values, q):
    edges = tuple(range(9))
    (found,) = result_of(M.Quantiles(edges, q), torch.tensor(values))
    rank = max(1, math.ceil(Fraction(str(q)) * len(values)))
    true = sorted(values)[rank - 1]
    assert math.floor(true) - (true == 8) <= found <= math.floor(true) + 1


def test_a_quantile_beyond_the_edges_is_absent_and_not_the_edge():
    values = torch.tensor([-5.0, 0.5, 0.5, 100.0])
    assert result_of(M.Quantiles((0, 1), (0.1, 0.5, 0.99)), values) == [None, 0.5, None]
    assert result_of(M.Quantiles(torch.tensor([0.0, 1.0]), np.array([0.75])), values) == [1.0]


MISUSES = {
    "a fraction, which no float is": (M.Sum(), (Fraction(1, 3),), "Sum.values"),
    "a complex number": (M.Sum(), (torch.zeros(2, dtype=torch.complex64),), "Sum.values"),
    "a list": (M.Mean(), ([1.0],), "Mean.values"),
    "text": (M.Ratio(), (torch.zeros(2), "2"), "Ratio.den"),
    "uint64": (M.Max(), (torch.zeros(2, dtype=torch.uint64),), "Max.values"),
    "more than int64": (M.Min(), (2**63,), "Min.values"),
    "targets of another shape": (M.TopK(1), (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64)), "TopK.targets"),
    "targets of floats": (M.TopK(1), (torch.zeros(4, 3), torch.zeros(4)), "TopK.targets"),
    "fewer classes than k": (M.TopK(5), (torch.zeros(4, 3), torch.zeros(4).long()), "TopK.logits"),
    "logits of half a byte": (
        M.TopK(1),
        (torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.zeros(2).long()),
        "TopK.logits",
    ),
    "logits without classes": (M.TopK(1), (torch.tensor(1.0), torch.tensor(0)), "TopK.logits"),
    "predictions of another shape": (M.Confusion(2), (torch.zeros(4, 1).long(), torch.zeros(4).long()), "predicted"),
    "probabilities": (M.F1(2), (torch.zeros(4), torch.zeros(4).long()), "F1.predicted"),
    "one mask for all rows": (M.PositionAccuracy(), (torch.zeros(2, 3), torch.ones(3)), "PositionAccuracy.correct"),
    "no positions": (M.AcceptanceLength(), (torch.tensor(1.0), torch.tensor(True)), "AcceptanceLength.valid"),
    "rates of probabilities": (M.AcceptanceRate(), (torch.zeros(2, 3), torch.ones(2, 3).bool()), "pass booleans"),
    "drafts without positions": (M.AcceptanceRate(), (torch.tensor(True), torch.tensor(True)), "AcceptanceRate.valid"),
    "drafts of another shape": (M.AcceptanceRate(), (torch.zeros(2, 3).long(), torch.zeros(2, 2).long()), "accepted"),
}


@pytest.mark.parametrize(("metric", "outputs", "names"), MISUSES.values(), ids=MISUSES)
def test_outputs_that_make_no_sense_are_refused_by_name(metric, outputs, names):
    with pytest.raises(InvalidArgument, match=names) as caught:
        metric.observe(metric.zero(), *outputs)
    assert caught.value.fix


@pytest.mark.parametrize(
    "make",
    [
        lambda: M.TopK(0),
        lambda: M.TopK(True),
        lambda: M.Confusion(0),
        lambda: M.Confusion(2.0),
        lambda: M.F1(-1),
        lambda: M.F1(2, average="weighted"),
        lambda: M.Variance(ddof=-1),
        lambda: M.Histogram((1.0,)),
        lambda: M.Histogram((1.0, 1.0)),
        lambda: M.Histogram((0.0, math.inf)),
        lambda: M.Histogram(("a", "b")),
        lambda: M.Quantiles((0, 1), ()),
        lambda: M.Quantiles((0, 1), 1.5),
        lambda: M.Quantiles((0, 1), (0.5, math.nan)),
        lambda: M.Quantiles((1, 0), 0.5),
    ],
)
def test_metrics_that_make_no_sense_are_refused_when_they_are_made(make):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.fix


def test_a_default_device_is_not_where_numbers_go():
    """Accumulators start on the CPU, whatever the script's default device."""
    with torch.device("meta"):
        acc = M.Ratio().observe(M.Ratio().zero(), 1, np.float32(4))
        hits = M.TopK(1).observe(M.TopK(1).zero(), torch.zeros(2, 3, device="cpu"), torch.zeros(2, device="cpu").long())
    assert M.Ratio().result(acc) == 0.25
    assert M.TopK(1).result(hits) == 1.0

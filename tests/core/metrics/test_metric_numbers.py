"""The numbers of each metric: a single rounding, ties, classes, edges, and non-finite values."""

import itertools
import math
from fractions import Fraction

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kit.core.metrics_cases import MostElements, each_metric, examples, exp_model, result_of, rows_of, variance_model

from trainfold import metrics as M
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import exact_value
from trainfold.core.metrics import ratio, topk
from trainfold.core.metrics.ratio import rounded_exp
from trainfold.properties.metrics.accumulators import difference_of


class Device(torch.utils._python_dispatch.TorchDispatchMode):
    """A device that must not be synchronized: no operator reads a value from it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), f"{function} waits for the device"
        assert "nonzero" not in str(function), f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@each_metric
@examples(3)
@given(data=st.data())
def test_observing_waits_for_no_device(case, data):
    """A meta tensor has no values, so an operator that reads one fails, and so does a copy back."""
    outputs = data.draw(case.values)
    there = tuple(output.to("meta") for output in outputs)
    with Device():
        acc = case.metric.observe(case.metric.zero(), *there)
        again = case.metric.observe(acc, *there)
    again = case.metric.observe(again, *outputs[:1], *there[1:])  # left on the CPU by mistake
    assert tree.structure(again) == tree.structure(case.metric.zero())
    assert all(leaf.dtype == torch.int64 for leaf in tree.leaves(again))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_metric
@examples(10)
@given(data=st.data())
def test_a_cuda_device_gives_the_bits_of_the_cpu_and_is_not_waited_for(case, data):
    metric, outputs = case.metric, data.draw(case.values)
    there = tuple(output.cuda() for output in outputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = metric.observe(metric.observe(metric.zero(), *there), *there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = metric.observe(metric.observe(metric.zero(), *outputs), *outputs)
    assert difference_of(metric.merge(metric.zero(), wanted), metric.merge(metric.zero(), found)) is None


@each_metric
def test_a_metric_is_a_value_that_prints_as_it_is_made(case):
    made = eval(repr(case.metric), vars(M))
    assert made == case.metric
    assert hash(made) == hash(case.metric)
    assert isinstance(case.metric, M.Metric)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        case.metric.additive = None


# --- particular metrics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, True, 0.1, np.float32(0.5), np.int64(7), np.float64(0.1)])
def test_numbers_are_outputs_too(number):
    assert result_of(M.Sum(), number) == float(number)
    assert result_of(M.Ratio(), number, 4) == number / 4
    assert result_of(M.Max(), number) == float(number)


def test_a_mean_of_ratios_is_not_the_ratio():
    """The purpose of the metric: a ragged last batch counts less than a full one (P14, P16)."""
    batches = [(torch.tensor([1.0, 1.0, 1.0]), 3), (torch.tensor([5.0]), 1)]
    acc = M.Ratio().zero()
    for nll, tokens in batches:
        acc = M.Ratio().observe(acc, nll, tokens)
    assert M.Ratio().result(acc) == 2.0
    assert sum(float(nll.mean()) for nll, _ in batches) / 2 == 3.0


@given(st.fractions(-740, 705))
@examples(40)
@example(Fraction(0))
@example(Fraction(1, 10**60))
@example(Fraction(-745133, 1000))
@example(Fraction(709782, 1000))
@example(Fraction(709783, 1000))
@example(Fraction(-(10**400)))
@example(Fraction(10**400))
def test_an_exponential_is_rounded_once(exponent):
    wanted = exp_model(exponent) if abs(exponent) < 10**6 else (math.inf if exponent > 0 else 0.0)
    assert rounded_exp(exponent) == wanted


@pytest.mark.parametrize("digits", [3, 10, 17])
def test_digits_are_added_until_the_rounding_is_certain(digits, monkeypatch):
    """For any initial number of digits; stopping at it would sometimes give a wrong last digit."""
    monkeypatch.setattr(ratio, "_DIGITS", digits)
    for number in range(-300, 300, 7):
        assert rounded_exp(Fraction(number, 11)) == exp_model(Fraction(number, 11))


def test_exponentials_of_what_is_not_finite():
    assert [rounded_exp(value) for value in (math.inf, -math.inf)] == [math.inf, 0.0]
    assert math.isnan(rounded_exp(math.nan))
    assert result_of(M.Perplexity(), math.inf, 3) == math.inf


@pytest.mark.parametrize("scale", [-1074, -1022, -540, -537, -401, -400, -399, 0, 399, 400, 401, 511, 512, 900, 1023])
def test_squares_neither_overflow_nor_vanish(scale):
    """The square of such a large or small number does not fit in a float64; the variance may fit after cancellation."""
    near = math.ldexp(1.0, scale)
    values = torch.tensor([near, math.nextafter(near, math.inf), -near, 0.0], dtype=torch.float64)
    assert result_of(M.Variance(), values) == variance_model(values)
    assert result_of(M.Variance(), torch.cat([values, values * 0.75])) == variance_model(
        torch.cat([values, values * 0.75])
    )


def squares_of(acc):
    shifts = (-1200, 0, 1200)
    return sum(exact_value(part) * Fraction(2) ** shift for part, shift in zip(acc.squares, shifts, strict=True))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20))
@examples(100)
def test_the_variance_of_any_bits_of_float64(patterns):
    values = torch.tensor(np.array(patterns, dtype=np.uint64).view(np.float64))
    values = values[values.isfinite()]
    metric = M.Variance()
    acc = metric.observe(metric.zero(), values)
    assert metric.result(acc) == variance_model(values)
    assert squares_of(acc) == sum((Fraction(value) ** 2 for value in values.tolist()), Fraction(0))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
@examples(50)
def test_squares_of_integers_are_exact(values):
    metric = M.Variance()
    acc = metric.observe(metric.zero(), torch.tensor(values, dtype=torch.int64))
    assert squares_of(acc) == sum(value * value for value in values)


def test_extremes_tell_the_zeros_apart_and_do_not_hide_nan():
    zeros = torch.tensor([0.0, -0.0])
    assert (str(result_of(M.Min(), zeros)), str(result_of(M.Max(), zeros))) == ("-0.0", "0.0")
    assert result_of(M.Min(), torch.tensor([math.inf, 1.0])) == 1.0
    assert result_of(M.Max(), torch.tensor([-math.inf])) == -math.inf
    acc = M.Min().observe(M.Min().zero(), torch.tensor([math.nan, math.inf, 1.0]))
    assert math.isnan(M.Min().result(acc))
    assert (acc.special.tolist(), int(acc.seen)) == ([1, 1, 0], 2)
    for metric in (M.Min(), M.Max()):
        without, nan = torch.tensor([2.0, -3.0]), torch.tensor([math.nan, -math.nan])
        keys = [metric.observe(metric.zero(), values).key for values in (without, torch.cat([without, nan]))]
        assert torch.equal(*keys)


def test_ties_among_logits_are_decided_by_index():
    """Eight equal logits in bf16: the top three are the first three classes, whatever a kernel returns."""
    logits, targets = torch.zeros(8, 8, dtype=torch.bfloat16), torch.arange(8)
    assert result_of(M.TopK(3), logits, targets) == 3 / 8


def test_logits_are_compared_some_rows_at_a_time(monkeypatch):
    logits = torch.randint(5, (50, 7), generator=torch.Generator().manual_seed(0)).float()
    targets = torch.arange(50) % 7
    at_once = result_of(M.TopK(2), logits, targets)
    for chunk in (1, 20, 70):
        monkeypatch.setattr(topk, "_CPU_CHUNK", chunk)
        assert result_of(M.TopK(2), logits, targets) == at_once
        assert result_of(M.TopK(2), logits.view(5, 10, 7), targets.view(5, 10)) == at_once
        longer = torch.cat([logits.view(5, 10, 7), torch.full((5, 1, 7), math.nan)], dim=1)
        assert result_of(M.TopK(2), longer[:, :-1], targets.view(5, 10)) == at_once


def test_logits_without_their_last_position_are_not_copied_as_a_whole():
    """The shift of a causal LM: a view with gaps, as large as the remaining memory."""
    logits = torch.randn(3, 41, 500, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(500, (3, 41), generator=torch.Generator().manual_seed(1))
    for shifted in (logits[:, :-1], logits[:, :-1].bfloat16(), logits.transpose(0, 1)[1:].transpose(0, 1)):
        with pytest.MonkeyPatch.context() as patch, MostElements() as seen:
            patch.setattr(topk, "_CPU_CHUNK", 2500)
            result = result_of(M.TopK(5), shifted, targets[:, 1:])
        assert seen.most <= 2500
        assert result == result_of(M.TopK(5), shifted.clone(), targets[:, 1:])


KINDS_OF_LOGITS = (
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.uint16, torch.uint32, torch.bool, torch.int64, torch.float16,
)  # fmt: skip


@pytest.mark.parametrize("dtype", KINDS_OF_LOGITS, ids=str)
def test_logits_of_any_kind_are_compared_without_rounding(dtype):
    logits = torch.tensor([[1.0, 2.0, 4.0], [4.0, 4.0, 1.0], [2.0, 1.0, 2.0]]).to(dtype)
    targets = torch.tensor([2, 1, 2])
    wanted = 0.0 if dtype == torch.bool else 1 / 3
    assert result_of(M.TopK(1), logits, targets) == wanted
    for large in {torch.uint32: [2**31], torch.int64: [2**31, 2**62]}.get(dtype, []):
        assert result_of(M.TopK(1), torch.tensor([[large, large + 1]]).to(dtype), torch.tensor([1])) == 1.0


@given(st.data())
@examples(100)
def test_the_top_k_of_a_cpu_are_those_of_the_definition(data):
    """Ties, infinities, NaN, any dtype and k: the separate CPU path is compared with the definition."""
    size, width = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 7))
    logits = data.draw(rows_of(size, (width,)))
    places = torch.tensor(data.draw(st.lists(st.integers(0, width - 1), min_size=size, max_size=size))).long()[:, None]
    k = data.draw(st.integers(1, width))
    among, spoiled = topk._are_among(logits, places, k)
    rows = logits.to(topk._COMPARED[logits.dtype])
    rank = topk._rank(rows, rows.gather(-1, places), torch.arange(width) < places)
    assert torch.equal(spoiled, rows.isnan().any(-1))
    assert torch.equal(among | spoiled, (rank < k) | spoiled)


def test_what_is_no_class_is_counted_and_refused_by_name():
    metric = M.TopK(1)
    acc = metric.observe(metric.zero(), torch.zeros(3, 2), torch.tensor([0, 7, -1]))
    with pytest.raises(InvalidArgument, match="found 2 others"):
        metric.result(metric.merge(acc, metric.zero()))
    for metric in (M.Confusion(2), M.F1(2)):
        acc = metric.observe(metric.zero(), torch.tensor([0, 2, 1, -100]), torch.tensor([0, 1, 5, -100]))
        with pytest.raises(InvalidArgument, match="found 2 pairs that are not"):
            metric.result(acc)
        for predicted in (-1, 2):
            acc = metric.observe(metric.zero(), torch.tensor([predicted]), torch.tensor([1]))
            assert (int(acc.counts.sum()), int(acc.outside)) == (0, 1)
    assert result_of(M.Confusion(2, ignore_index=7), torch.tensor([0, 1]), torch.tensor([7, 1])) == [[0, 0], [0, 1]]
    acc = M.Confusion(2, ignore_index=None).observe(M.Confusion(2).zero(), torch.tensor([0]), torch.tensor([-100]))
    assert int(acc.outside) == 1
    assert result_of(M.TopK(1, ignore_index=None), torch.tensor([[1.0, 0.0]]), torch.tensor([0])) == 1.0


def test_rows_with_nan_are_wrong_and_counted():
    metric = M.TopK(2)
    logits = torch.tensor([[math.nan, 1.0, 0.0], [2.0, 1.0, 0.0], [math.nan, 0.0, 0.0]])
    acc = metric.observe(metric.zero(), logits, torch.tensor([1, 0, -100]))
    assert (metric.result(acc), acc.special.tolist()) == (0.5, [1, 0, 0])


def test_the_series_of_lengths_ends_where_nothing_is_known():
    accepted = torch.tensor([[1, 1, 1, 1]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 0, 1]], dtype=torch.bool)
    assert result_of(M.AcceptanceLength(), accepted, valid) == 2.0
    assert result_of(M.AcceptanceLength(), accepted[:, 2:], valid[:, 2:]) is None
    assert result_of(M.PositionAccuracy(), accepted, valid) == [1.0, 1.0, None, 1.0]
    assert result_of(M.PositionAccuracy(), accepted[:, :3], valid[:, :3]) == [1.0, 1.0]


def test_lengths_of_what_is_not_finite_are_not_finite():
    valid = torch.ones(1, 3, dtype=torch.bool)
    for last in (math.nan, math.inf):
        accepted = torch.tensor([[1.0, 0.5, last]], dtype=torch.float64)
        assert repr(result_of(M.AcceptanceLength(), accepted, valid)) == repr(last)


def test_counts_by_position_are_numerators_and_denominators():
    """S50: a forward may return the sums of a batch; they count like its rows."""
    accepted = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    valid = torch.ones(4, 3, dtype=torch.int64)
    for metric in (M.AcceptanceLength(), M.PositionAccuracy()):
        rows = result_of(metric, accepted, valid)
        assert result_of(metric, accepted.sum(0), valid.sum(0)) == rows
        assert result_of(metric, accepted.sum(0).float() / 8, valid.sum(0).float() / 8) == rows
    assert result_of(M.AcceptanceLength(), accepted.sum(0), valid.sum(0)) == 0.75 + 0.75 * 0.5 + 0.75 * 0.5 * 0.25


def test_more_accepted_than_there_was_is_refused():
    """A mask or a weight is missing on one side; the products of such ratios would look like a length."""
    weights = torch.full((2, 2), 0.5)
    for metric in (M.AcceptanceLength(), M.PositionAccuracy()):
        with pytest.raises(InvalidArgument, match="position 0"):
            result_of(metric, torch.ones(2, 2), weights)
    with pytest.raises(InvalidArgument, match="position 1"):
        result_of(M.AcceptanceLength(), torch.tensor([[1, -1]]), torch.ones(1, 2, dtype=torch.int64))


def test_the_product_of_means_is_not_the_mean_of_products():
    """S50: the geometric part is computed after the global reduce."""
    metric, ones = M.AcceptanceLength(), torch.ones(1, 2, dtype=torch.bool)
    first, second = torch.tensor([[True, True]]), torch.tensor([[False, False]])
    acc = metric.observe(metric.observe(metric.zero(), first, ones), second, ones)
    assert metric.result(acc) == 0.75
    assert (result_of(metric, first, ones) + result_of(metric, second, ones)) / 2 == 1.0


def test_fractional_weights_are_not_rounded_up_to_one():
    """S50: neither ``max(weight, 1)`` nor ``clamp_min(1)``."""
    weights = torch.tensor([[0.25, 0.25]])
    assert result_of(M.PositionAccuracy(), torch.tensor([[True, False]]), weights) == [1.0, 0.0]
    assert result_of(M.Ratio(), torch.tensor([0.25]), torch.tensor([0.5])) == 0.5


def test_padding_has_no_say_even_if_it_is_nan():
    correct = torch.tensor([[1.0, math.nan]])
    assert result_of(M.PositionAccuracy(), correct, torch.tensor([[2.0, 0.0]])) == [0.5]
    assert result_of(M.PositionAccuracy(), correct, torch.tensor([[True, False]])) == [1.0]


def test_an_integer_is_not_rounded_into_the_next_bin():
    top = 2**54 + 4
    values = torch.tensor([top - 1, top, top + 1])
    assert float(top - 1) == float(top)
    assert result_of(M.Histogram((0, top)), values) == {"below": 0, "counts": [2], "above": 1, "nan": 0}
    assert result_of(M.Histogram((-(2.0**64), 2.0**63)), values)["counts"] == [3]
    assert result_of(M.Histogram((2.0**63, 2.0**64)), values)["below"] == 3


def test_edges_that_no_float_is_are_compared_exactly():
    edge = 2**53 + 1
    assert float(edge) != edge
    metric = M.Histogram((0, edge, 2 * edge + 1))
    assert metric.edges == (0, edge, 2 * edge + 1)
    assert result_of(metric, torch.tensor([edge - 1, edge, edge + 1]))["counts"] == [1, 2]
    values = torch.tensor([edge - 1, edge + 1], dtype=torch.float64)
    assert result_of(metric, values)["counts"] == [1, 1]
    assert result_of(M.Histogram((0, edge)), values) == {"below": 0, "counts": [1], "above": 1, "nan": 0}
    assert result_of(M.Histogram((-edge, 0)), -values) == {"below": 1, "counts": [1], "above": 0, "nan": 0}
    assert result_of(M.Histogram((0, 10, 10.5)), torch.tensor([9, 10, 11]))["counts"] == [1, 1]
    assert repr(M.Histogram((0, 10))) == repr(M.Histogram((0.0, 10.0)))
    huge = torch.tensor([-math.inf, -1.7e308, 1.7e308, math.inf], dtype=torch.float64)
    assert result_of(M.Histogram((-(10**400), 0, 10**400)), huge)["counts"] == [1, 1]


def test_the_largest_integers_lie_below_edges_that_are_larger():
    ends = torch.tensor([2**63 - 1, -(2**63)])
    assert result_of(M.Histogram((0, 2**63, 2**64)), ends) == {"below": 1, "counts": [1, 0], "above": 0, "nan": 0}
    assert result_of(M.Histogram((-(2**64), -(2**63) - 1, 0)), ends)["counts"] == [0, 1]
    assert result_of(M.Histogram((0, 2**63 - 1)), ends) == {"below": 1, "counts": [1], "above": 0, "nan": 0}


@given(st.data())
@examples(60)
def test_a_histogram_of_any_edges_counts_what_lies_between_them(data):
    near = st.sampled_from([0, 2**53, 2**62, 2**63, -(2**63), 10**30]).flatmap(lambda n: st.integers(n - 3, n + 3))
    edges = sorted(data.draw(st.sets(st.one_of(near, st.floats(-4, 4)), min_size=2, max_size=5)))
    whole = data.draw(st.lists(near.filter(lambda n: -(2**63) <= n < 2**63), max_size=8))
    for values in (torch.tensor(whole, dtype=torch.int64), torch.tensor(whole, dtype=torch.float64)):
        listed = [int(value) for value in values.tolist()]
        counts = [sum(low <= v < high for v in listed) for low, high in itertools.pairwise(edges)]
        counts[-1] += sum(v == edges[-1] for v in listed)
        ends = {"below": sum(v < edges[0] for v in listed), "above": sum(v > edges[-1] for v in listed)}
        found = result_of(M.Histogram(edges), values)
        assert found == (
            {"below": ends["below"], "counts": counts, "above": ends["above"], "nan": 0} if listed else None
        )

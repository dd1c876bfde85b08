"""Metrics against simple models in plain Python, over any values, dtypes, batches, orders and ranks."""

import functools
import itertools
import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import exact_value, rounded
from trainfold.core.metrics import blocks, perplexity, topk
from trainfold.core.metrics.counts import add_counts, beside
from trainfold.core.metrics.perplexity import rounded_exp
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import contracts, laws
from trainfold.properties.accumulators import difference_of, leafwise_sum

FLOATS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 32}
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
EDGES = (-1e3, -1.5, 0.0, 0.5, 0.75, 2.0, 1e3)


IS_DEEP = "HYPOTHESIS_PROFILE" in os.environ


def examples(count):
    """Half as many in a usual run, for there are many metrics; ten times as many and more with the profiles `laws` and `soak`."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(deadline=None, max_examples=count if IS_DEEP else max(2, count // 2), suppress_health_check=slow)


# --- values ----------------------------------------------------------------------------------------------------------


@st.composite
def rows_of(draw, size, width=(), dtype=None, finite=None):
    """A tensor [size, *width] of any dtype: numbers far apart, of one size, equal, cancelling; sometimes not finite."""
    dtype = draw(st.sampled_from([*FLOATS, *INTS, torch.bool])) if dtype is None else dtype
    count = size * math.prod(width)
    if dtype in FLOATS:
        finite = draw(st.sampled_from([True, True, False])) if finite is None else finite
        wide = st.floats(width=FLOATS[dtype], allow_nan=not finite, allow_infinity=not finite)
        odd = [] if finite else [math.nan, math.inf, -math.inf]
        near = st.sampled_from([*odd, 0.0, -0.0, 0.1, 0.5, -0.5, 0.75, 1.0, -1.0, 2.0, 3.1, -3.1, 1e3, 1e-3])
        kinds = draw(st.sampled_from([wide, near, st.one_of(wide, near)]))
        values = draw(st.lists(kinds, min_size=count, max_size=count))
        found = torch.tensor(values, dtype=torch.float64).to(dtype)
        if finite:
            found = torch.where(found.isfinite(), found, torch.ones_like(found))
        if draw(st.booleans()):  # what comes again with the other sign cancels
            found = torch.where(torch.arange(count) % 2 == 1, -found.roll(1), found)
    elif dtype == torch.bool:
        found = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype)
    else:
        bounds = draw(st.sampled_from([(torch.iinfo(dtype).min, torch.iinfo(dtype).max), (0, 3)]))
        found = torch.tensor(draw(st.lists(st.integers(*bounds), min_size=count, max_size=count)), dtype=dtype)
    return found.reshape(size, *width)


def sizes():
    return st.integers(0, 12)


@st.composite
def numbers(draw):
    """One tensor, [n] or [n, 3]."""
    return (draw(rows_of(draw(sizes()), draw(st.sampled_from([(), (3,)])))),)


@st.composite
def quotients(draw):
    """Numerators [n, 2] and denominators [n], also masks and fractions."""
    size = draw(sizes())
    return draw(rows_of(size, (2,))), draw(rows_of(size))


@st.composite
def losses(draw):
    """Losses of a plausible size, and masks."""
    size = draw(sizes())
    values = draw(st.lists(st.floats(-800, 800, width=32), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float32), draw(rows_of(size, dtype=torch.bool))


@st.composite
def shares(draw):
    """Rows of at most 5 positions: what counts, and booleans or a part of it that is accepted."""
    size, length = draw(sizes()), draw(st.integers(0, 5))
    valid = draw(rows_of(size, (length,), dtype=draw(st.sampled_from([torch.bool, torch.uint8, torch.float32]))))
    if valid.is_floating_point():
        valid = torch.where(valid.isfinite(), valid.abs(), torch.zeros_like(valid))
    mask = draw(rows_of(size, (length,), dtype=torch.bool))
    return mask if draw(st.booleans()) else torch.where(mask, valid, torch.zeros_like(valid)), valid


@st.composite
def drafts(draw):
    size, length = draw(sizes()), draw(st.integers(0, 4))
    dtypes = st.sampled_from([torch.bool, torch.uint8, torch.int64])
    return tuple(draw(rows_of(size, (length,), dtype=draw(dtypes))) for _ in range(2))


@st.composite
def choices(draw):
    """Logits of 4 classes with many ties, some NaN and infinite; targets, some of them to be ignored."""
    size = draw(sizes())
    logits = draw(rows_of(size, (4,), dtype=draw(st.sampled_from([*FLOATS, torch.int8]))))
    return logits, torch.tensor(
        draw(st.lists(st.sampled_from([0, 1, 2, 3, -100]), min_size=size, max_size=size))
    ).long()


@st.composite
def pairs(draw):
    size = draw(sizes())
    predicted = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    targets = draw(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=size, max_size=size))
    return torch.tensor(predicted, dtype=torch.int32), torch.tensor(targets, dtype=torch.int64)


# --- models ----------------------------------------------------------------------------------------------------------


def total(values) -> Fraction | float:
    """What IEEE 754 says of the sum, were it not rounded."""
    values = list(values)
    odd = [value for value in values if isinstance(value, float) and not math.isfinite(value)]
    return sum(odd) if odd else sum(map(Fraction, values), Fraction(0))


def quotient(num, den):
    if not isinstance(den, Fraction):
        return math.nan
    if isinstance(num, Fraction):
        return num / den if den else None
    return -num if den < 0 else num


def once(value):
    return None if value is None else rounded(value)


def flat(tensor) -> list[Any]:
    return tensor.reshape(-1).tolist()


def sum_model(values):
    return once(total(flat(values))) if values.numel() else None


def mean_model(values):
    return once(quotient(total(flat(values)), Fraction(values.numel())))


def ratio_model(num, den):
    return once(quotient(total(flat(num)), total(flat(den))))


def perplexity_model(nll, tokens):
    found = quotient(total(flat(nll)), total(flat(tokens)))
    return None if found is None else exp_model(found)


def exp_model(exponent: Fraction) -> float:
    """In integers of 5,000 bits after the point: the series of ``exp(x / 2**10)``, squared ten times."""
    bits = 5000
    x = (abs(exponent.numerator) << bits) // (exponent.denominator << 10)
    term = one = 1 << bits
    found, n = 0, 0
    while term:
        found, n = found + term, n + 1
        term = (term * x >> bits) // n
    for _ in range(10):
        found = found * found >> bits
    return rounded(Fraction(found, one) if exponent >= 0 else Fraction(one, found))


def variance_model(values, ddof=0):
    listed = flat(values)
    if len(listed) <= ddof:
        return None
    if not all(map(math.isfinite, listed)):
        return math.nan
    mean = sum(map(Fraction, listed), Fraction(0)) / len(listed)
    return rounded(sum((Fraction(x) - mean) ** 2 for x in listed) / (len(listed) - ddof))


def extreme_model(values, *, pick):
    listed = [float(value) for value in flat(values)]
    if any(map(math.isnan, listed)):
        return math.nan
    return pick(listed, key=lambda value: (value, math.copysign(1, value)), default=None)


def product(one, other):
    if math.isfinite(one) and math.isfinite(other):
        return Fraction(one) * Fraction(other)
    return float(one) * float(other)


def position_ratios(correct, valid):
    found = []
    for right, counts in zip(correct.T.tolist(), valid.T.tolist(), strict=True):
        pairs = [(r, v) for r, v in zip(right, counts, strict=True) if v != 0]
        found.append(quotient(total((v if r else 0) if isinstance(r, bool) else r for r, v in pairs), total(counts)))
    return found


def position_model(correct, valid):
    ratios = position_ratios(correct, valid)
    while ratios and ratios[-1] is None:
        ratios.pop()
    return [once(ratio) for ratio in ratios] or None


def length_model(accepted, valid):
    ratios = list(itertools.takewhile(lambda ratio: ratio is not None, position_ratios(accepted, valid)))
    if not all(isinstance(ratio, Fraction) for ratio in ratios):
        ratios = [once(ratio) for ratio in ratios]
    length, reached = None, 1
    for ratio in ratios:
        reached = reached * ratio
        length = reached + (length or 0)
    return once(length)


def rate_model(accepted, valid):
    width = accepted.shape[1]
    hits, reached = [0] * width, [0] * width
    for taken, there in zip(accepted.tolist(), valid.tolist(), strict=True):
        for i in range(width):
            if not there[i]:
                break
            reached[i] += 1
            if not taken[i]:
                break
            hits[i] += 1
    return [hit / all_of_it for hit, all_of_it in zip(hits, reached, strict=True) if all_of_it] or None


def topk_model(logits, targets, k):
    rows = [(row, target) for row, target in zip(logits.tolist(), targets.tolist(), strict=True) if target != -100]
    correct = 0
    for row, target in rows:
        order = sorted(range(4), key=lambda c: (-row[c], c))
        correct += not any(map(math.isnan, row)) and target in order[:k]
    return correct / len(rows) if rows else None


def confusion_model(predicted, targets):
    table = [[0] * 3 for _ in range(3)]
    for found, target in zip(predicted.tolist(), targets.tolist(), strict=True):
        if target != -100:
            table[target][found] += 1
    return table if any(map(any, table)) else None


def f1_model(predicted, targets, average):
    cases = [(p, t) for p, t in zip(predicted.tolist(), targets.tolist(), strict=True) if t != -100]
    if not cases:
        return None
    scores = []
    for c in range(3):
        hits = sum(p == t == c for p, t in cases)
        found, wanted = sum(p == c for p, _ in cases), sum(t == c for _, t in cases)
        if found + wanted == 0:
            scores.append(None)
        elif hits == 0:
            scores.append(Fraction(0))
        else:
            precision, recall = Fraction(hits, found), Fraction(hits, wanted)
            scores.append(2 * precision * recall / (precision + recall))
    if average == "micro":
        return sum(p == t for p, t in cases) / len(cases)
    if average == "none":
        return [once(score) for score in scores]
    present = [score for score in scores if score is not None]
    return rounded(sum(present) / len(present))


def histogram_model(values):
    listed = flat(values)
    numbers = [value for value in listed if value == value]
    if not listed:
        return None
    counts = [sum(low <= v < high for v in numbers) for low, high in itertools.pairwise(EDGES)]
    counts[-1] += sum(v == EDGES[-1] for v in numbers)
    return {
        "below": sum(v < EDGES[0] for v in numbers),
        "counts": counts,
        "above": sum(v > EDGES[-1] for v in numbers),
        "nan": len(listed) - len(numbers),
    }


QS = (0.0, 0.1, 0.5, 0.9, 1.0)


def quantiles_model(values):
    """By the definition: the least x at which the piecewise linear cumulative count is q * N."""
    found = histogram_model(values)
    if found is None or found["nan"]:
        return found and [math.nan] * len(QS)
    bins = [
        (None, None, found["below"]),
        *zip(EDGES, EDGES[1:], found["counts"], strict=False),
        (None, None, found["above"]),
    ]
    bins = [each for each in bins if each[2]]
    size = sum(count for _, _, count in bins)
    results = []
    for q in QS:
        wanted = Fraction(str(q)) * size
        before = 0
        for low, high, count in bins:
            if wanted <= before + count:
                part = (wanted - before) / count
                results.append(None if low is None else rounded(Fraction(low) * (1 - part) + Fraction(high) * part))
                break
            before += count
    return results


@attrs.frozen
class Case:
    metric: Any
    model: Callable[..., Any]
    values: st.SearchStrategy[tuple[torch.Tensor, ...]]
    is_ragged: bool = False


CASES = {
    "Sum": Case(M.Sum(), sum_model, numbers()),
    "Mean": Case(M.Mean(), mean_model, numbers()),
    "Ratio": Case(M.Ratio(), ratio_model, quotients()),
    "Perplexity": Case(M.Perplexity(), perplexity_model, losses()),
    "Variance": Case(M.Variance(), variance_model, numbers()),
    "Variance(ddof=2)": Case(M.Variance(ddof=2), functools.partial(variance_model, ddof=2), numbers()),
    "Min": Case(M.Min(), functools.partial(extreme_model, pick=min), numbers()),
    "Max": Case(M.Max(), functools.partial(extreme_model, pick=max), numbers()),
    "PositionAccuracy": Case(M.PositionAccuracy(), position_model, shares(), is_ragged=True),
    "AcceptanceLength": Case(M.AcceptanceLength(), length_model, shares(), is_ragged=True),
    "AcceptanceRate": Case(M.AcceptanceRate(), rate_model, drafts(), is_ragged=True),
    "TopK(1)": Case(M.TopK(1), functools.partial(topk_model, k=1), choices()),
    "TopK(3)": Case(M.TopK(3), functools.partial(topk_model, k=3), choices()),
    "Confusion": Case(M.Confusion(3), confusion_model, pairs()),
    **{
        f"F1({average})": Case(M.F1(3, average=average), functools.partial(f1_model, average=average), pairs())
        for average in ("macro", "micro", "none")
    },
    "Histogram": Case(M.Histogram(EDGES), histogram_model, numbers()),
    "Quantiles": Case(M.Quantiles(EDGES, QS), quantiles_model, numbers()),
}
each_metric = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def cropped(outputs, spare):
    """A batch without the positions that nobody in it has, but for a few."""
    valid = outputs[-1]
    used = int((valid != 0).any(0).nonzero().max()) + 1 if bool((valid != 0).any()) else 0
    return tuple(output[:, : min(used + spare, output.shape[1])] for output in outputs)


def ranks_of(data, case, outputs):
    """The accumulators of 1 to 8 ranks that share the rows in any order, in batches of any size, some of them empty."""
    size = len(outputs[0])
    order = torch.tensor(data.draw(st.permutations(range(size))), dtype=torch.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    ranks = [case.metric.zero() for _ in range(data.draw(st.integers(1, 8)))]
    for rows in order.tensor_split(cuts):
        batch = tuple(output[rows] for output in outputs)
        if case.is_ragged:
            batch = cropped(batch, data.draw(st.integers(0, 1)))
        rank = data.draw(st.integers(0, len(ranks) - 1))
        ranks[rank] = case.metric.observe(ranks[rank], *batch)
    return data.draw(st.permutations(ranks))


# --- laws ------------------------------------------------------------------------------------------------------------


@each_metric
@examples(60)
@given(data=st.data())
def test_a_metric_is_what_its_model_says_however_the_samples_are_dealt_out(case, data):
    """Q01, Q02, Q04: any batch sizes, order, lengths, ranks with nothing, values that are not finite."""
    outputs = data.draw(case.values)
    wanted = repr(case.model(*outputs))
    assert repr(case.metric.result(case.metric.observe(case.metric.zero(), *outputs))) == wanted
    ranks = ranks_of(data, case, outputs)
    merged = functools.reduce(case.metric.merge, ranks, case.metric.zero())
    assert repr(case.metric.result(merged)) == wanted
    if case.metric.additive:
        added = case.metric.merge(case.metric.zero(), leafwise_sum(ranks))
        assert repr(case.metric.result(added)) == wanted


@each_metric
@examples(6)
@given(data=st.data())
def test_ranks_that_evaluate_have_what_the_model_says(case, data):
    """Q04, Q09: additive or not, ragged or not, with ranks that have nothing; on every rank the same."""
    outputs = data.draw(case.values)
    shares = [[] for _ in range(data.draw(st.integers(1, 4)))]
    for rows in torch.arange(len(outputs[0])).tensor_split(data.draw(st.integers(1, 5))):
        batch = tuple(output[rows] for output in outputs)
        batch = cropped(batch, data.draw(st.integers(0, 1))) if case.is_ragged else batch
        data.draw(st.sampled_from(shares)).append(batch)

    def on_rank(collectives):
        share = shares[collectives.rank]
        return trainfold.evaluate(lambda batch: {"it": batch}, share, {"it": case.metric}, collectives=collectives)

    wanted = case.model(*outputs)
    for found in run_threads(len(shares), on_rank):
        assert repr(found.get("it")) == repr(wanted)
        assert ("it" in found) == (wanted is not None)


@each_metric
@examples(8)
@given(data=st.data())
def test_a_metric_keeps_the_contract(case, data):
    samples = [data.draw(case.values) for _ in range(3)]
    largest = max(samples, key=lambda sample: len(sample[0]))
    assume(len(largest[0]) > 1)
    contracts.check_metric(lambda: case.metric, samples)
    laws.batch_invariant(case.metric, largest, max_examples=8)


@each_metric
def test_nothing_seen_is_absent(case):
    """S50, Q04: no metric makes up a number."""
    assert case.metric.result(case.metric.zero()) is None


@each_metric
@examples(3)
@given(data=st.data())
def test_an_evaluation_can_be_saved_in_the_middle(case, data, tmp_path_factory):
    """An accumulator is a tree like any other: it lies in a checkpoint, and comes back to the bit."""
    run = tmp_path_factory.mktemp("run")
    first, second = data.draw(case.values), data.draw(case.values)
    half = case.metric.observe(case.metric.zero(), *first)
    state = TrainState(trainer=Progress(), extra={"evaluation": {"metric": half}})
    trainfold.save(state, run)
    back = trainfold.load(run, like=state).extra["evaluation"]["metric"]
    for mine, theirs in zip(tree.leaves(half), tree.leaves(back), strict=True):
        assert torch.equal(mine, theirs)
    one, other = (case.metric.result(case.metric.observe(acc, *second)) for acc in (half, back))
    assert repr(one) == repr(other)


class Device(torch.utils._python_dispatch.TorchDispatchMode):
    """A device for which nobody may wait: no operator reads a value from it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), f"{function} waits for the device"
        assert "nonzero" not in str(function), f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@each_metric
@examples(3)
@given(data=st.data())
def test_observing_waits_for_no_device(case, data):
    """A meta tensor has no values, so that whoever asked for one would fail, as would a copy back."""
    outputs = data.draw(case.values)
    there = tuple(output.to("meta") for output in outputs)
    with Device():
        acc = case.metric.observe(case.metric.zero(), *there)
        again = case.metric.observe(acc, *there)
    again = case.metric.observe(again, *outputs[:1], *there[1:])  # forgotten on the CPU
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


# --- what is particular ----------------------------------------------------------------------------------------------


def result_of(metric, *outputs):
    return metric.result(metric.observe(metric.zero(), *outputs))


@pytest.mark.parametrize("number", [2, True, 0.1, np.float32(0.5), np.int64(7), np.float64(0.1)])
def test_numbers_are_outputs_too(number):
    assert result_of(M.Sum(), number) == float(number)
    assert result_of(M.Ratio(), number, 4) == number / 4
    assert result_of(M.Max(), number) == float(number)


def test_a_mean_of_ratios_is_not_the_ratio():
    """What the metric is for: a ragged last batch does not count as much as a full one (P14, P16)."""
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
    """However few there are to begin with; to stop with these would be wrong in the last place now and then."""
    monkeypatch.setattr(perplexity, "_DIGITS", digits)
    for number in range(-300, 300, 7):
        assert rounded_exp(Fraction(number, 11)) == exp_model(Fraction(number, 11))


def test_exponentials_of_what_is_not_finite():
    assert [rounded_exp(value) for value in (math.inf, -math.inf)] == [math.inf, 0.0]
    assert math.isnan(rounded_exp(math.nan))
    assert result_of(M.Perplexity(), math.inf, 3) == math.inf


@pytest.mark.parametrize("scale", [-1074, -1022, -540, -537, -401, -400, -399, 0, 399, 400, 401, 511, 512, 900, 1023])
def test_squares_neither_overflow_nor_vanish(scale):
    """The square of what is this large or small is no float64; the variance of what cancels may be one."""
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
    """Eight equal logits in bf16: the first three classes are the top three, whatever a kernel would say."""
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


class MostElements(torch.utils._python_dispatch.TorchDispatchMode):
    """The size of the largest tensor that an operator makes for itself."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            each.untyped_storage().data_ptr() for each in (*args, *(kwargs or {}).values()) if torch.is_tensor(each)
        }
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, each.untyped_storage().nbytes() // each.element_size())
        return made


def test_logits_without_their_last_position_are_not_copied_as_a_whole():
    """The shift of a causal LM: a view that has gaps, as large as the memory that is left."""
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
    """Ties, infinities, NaN, any dtype and k; with a path of its own for a CPU and the definition beside it."""
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
    """S50: sums of a batch, as a forward may return them, are what the rows of it are."""
    accepted = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    valid = torch.ones(4, 3, dtype=torch.int64)
    for metric in (M.AcceptanceLength(), M.PositionAccuracy()):
        rows = result_of(metric, accepted, valid)
        assert result_of(metric, accepted.sum(0), valid.sum(0)) == rows
        assert result_of(metric, accepted.sum(0).float() / 8, valid.sum(0).float() / 8) == rows
    assert result_of(M.AcceptanceLength(), accepted.sum(0), valid.sum(0)) == 0.75 + 0.75 * 0.5 + 0.75 * 0.5 * 0.25


def test_more_accepted_than_there_was_is_refused():
    """A mask or a weight was forgotten on one side: the products of such ratios would look like a length."""
    weights = torch.full((2, 2), 0.5)
    for metric in (M.AcceptanceLength(), M.PositionAccuracy()):
        with pytest.raises(InvalidArgument, match="position 0"):
            result_of(metric, torch.ones(2, 2), weights)
    with pytest.raises(InvalidArgument, match="position 1"):
        result_of(M.AcceptanceLength(), torch.tensor([[1, -1]]), torch.ones(1, 2, dtype=torch.int64))


def test_the_product_of_means_is_not_the_mean_of_products():
    """S50: the geometric part is taken after the global reduce."""
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
    """A finite sum over 0 is absent; what is not finite was an error of the run, and shows."""
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
    """Whatever their layout is; what is needed beside them does not grow with them."""
    values = (torch.randn(40, 3, 50_001, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[..., :-1]
    with MostElements() as seen:
        acc = metric.observe(metric.zero(), values)
    assert seen.most <= blocks.BLOCK * (
        6 if type(metric) is M.Variance else 1
    )  # an integer has three parts, six products
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
    found = list(blocks.blocks_of(tensor, size, keep=keep))
    tail = tensor.shape[tensor.dim() - keep :]
    rows = tensor.reshape(math.prod(tensor.shape[: tensor.dim() - keep]), *tail)
    assert torch.equal(torch.cat(found), rows)
    assert all(len(block) <= size and block.shape[1:] == tail for block in found)


def test_pinned_memory_is_copied_before_a_device_reads_it(monkeypatch):
    """A loader refills its pinned buffers; what is sent later must not be what is there by then."""
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
    "rates of probabilities": (M.AcceptanceRate(), (torch.zeros(2, 3), torch.ones(2, 3).bool()), "give booleans"),
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
    """Accumulators begin on the CPU, whatever the script's default device is."""
    with torch.device("meta"):
        acc = M.Ratio().observe(M.Ratio().zero(), 1, np.float32(4))
        hits = M.TopK(1).observe(M.TopK(1).zero(), torch.zeros(2, 3, device="cpu"), torch.zeros(2, device="cpu").long())
    assert M.Ratio().result(acc) == 0.25
    assert M.TopK(1).result(hits) == 1.0

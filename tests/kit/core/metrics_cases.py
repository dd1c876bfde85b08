"""Shared cases for the tests of metrics."""

import functools
import itertools
import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from trainfold import metrics as M
from trainfold.core.exact.sum import rounded

FLOATS = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 32}


INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


EDGES = (-1e3, -1.5, 0.0, 0.5, 0.75, 2.0, 1e3)


IS_DEEP = "HYPOTHESIS_PROFILE" in os.environ


def examples(count):
    """Half as many in a usual run, since there are many metrics; ten times as many or more with `laws` and `soak`."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(deadline=None, max_examples=count if IS_DEEP else max(2, count // 2), suppress_health_check=slow)


# --- values ----------------------------------------------------------------------------------------------------------


@st.composite
def rows_of(draw, size, width=(), dtype=None, finite=None):
    """A tensor [size, *width] of any dtype: far apart, of one size, equal or cancelling; sometimes non-finite."""
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
        if draw(st.booleans()):  # numbers that occur again with the other sign cancel
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
    """Numerators [n, 2] and denominators [n], including masks and fractions."""
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
    """Rows of at most 5 positions: the accepted part, as booleans or weights, and the weight of each position."""
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
    """Logits of 4 classes with many ties, NaN and infinities; targets, some of them to ignore."""
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
    """The IEEE 754 value of the sum if it were not rounded."""
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
    """The series of ``exp(x / 2**10)``, squared ten times, in integers with 5,000 fractional bits."""
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
    """By definition: the least x at which the piecewise linear cumulative count is q * N."""
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


def result_of(metric, *outputs):
    return metric.result(metric.observe(metric.zero(), *outputs))


class MostElements(torch.utils._python_dispatch.TorchDispatchMode):
    """The size of the largest tensor allocated by an operator."""

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

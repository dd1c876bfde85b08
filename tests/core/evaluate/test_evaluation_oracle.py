"""Exact evaluation against `fractions.Fraction`: thousands of random cases, or a million with `make oracle`."""

import contextlib
import itertools
import math
import os
from collections import Counter
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.depth import IS_DEEP

from trainfold import metrics as M
from trainfold.core import tree
from trainfold.core.evaluate.combine import check_same_suite, layout_of, tally_of, vector_of
from trainfold.core.evaluate.suite import Tally, merge_tallies, no_tally, observe, results_of
from trainfold.core.exact import cpu_sum, terms

pytestmark = pytest.mark.slow(0.5)

RANDOM_CASES = int(os.environ.get("TRAINFOLD_RANDOM_CASES", "1600" if IS_DEEP else "640"))
EXAMPLES = int(os.environ.get("TRAINFOLD_EXAMPLES", "300"))
BLOCKS = 8

SUITE = {"loss": M.Ratio()}
WITH_MEAN = {"loss": M.Ratio(), "mean": M.Mean()}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KINDS = ["normal", "wide", "subnormal", "cancelling", "bits", "sparse", "integers", "not finite"]
SMALLEST = {torch.float64: -1074, torch.float32: -149, torch.float16: -24, torch.bfloat16: -133}
LARGEST = {torch.float64: 1023, torch.float32: 127, torch.float16: 15, torch.bfloat16: 127}


def values_of(rng, kind, dtype, count):
    """Terms of one kind, all representable in the dtype."""
    normal = rng.standard_normal(count)
    if kind == "wide":
        normal = np.ldexp(normal, rng.integers(SMALLEST[dtype], LARGEST[dtype] - 3, count))
    elif kind == "subnormal":
        normal = np.ldexp(rng.integers(-(2**6), 2**6, count).astype(float), SMALLEST[dtype])
    elif kind == "cancelling":
        normal = np.ldexp(normal, rng.integers(-20, 12, count))
        normal[: count // 2] = -normal[count - count // 2 :]
    elif kind == "sparse":
        normal *= rng.random(count) < 0.5
    elif kind == "integers":
        return torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, count, dtype=np.int64))
    elif kind == "not finite":
        normal = np.where(rng.random(count) < 0.2, rng.choice([math.nan, math.inf, -math.inf], count), normal)
    elif kind == "bits":
        bits = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, count, dtype=np.int64))
        found = bits.view(dtype)[:count] if count else torch.zeros(0, dtype=dtype)
        return torch.where(found.isfinite(), found, 0)
    return torch.from_numpy(normal).to(dtype)


def total_of(numbers):
    """The sum of floats or integers as a fraction: each is an integer over 2**1074."""
    scale = 1 << 1074
    ratios = (number.as_integer_ratio() for number in numbers)
    return Fraction(sum(top * (scale // bottom) for top, bottom in ratios), scale)


def oracle(values, weights):
    """The expected ratio, from fractions and the documented policy alone."""
    total = total_of(weights.tolist())
    numbers = values.tolist() if not values.is_floating_point() else values.double().tolist()
    odd = [number for number in numbers if not math.isfinite(number)]
    if odd:
        found = sum(odd)
        return -found if total < 0 else found
    if not total:
        return None
    quotient = total_of(numbers) / total
    try:
        return float(quotient)
    except OverflowError:
        return math.inf if quotient > 0 else -math.inf


def saved(tally):
    """The bytes of a tally in a checkpoint."""
    return tree.map_tensors(
        lambda leaf: torch.from_numpy(np.frombuffer(leaf.numpy().tobytes(), "<i8").reshape(leaf.shape).copy()), tally
    )


def given_to(suite, values, weights):
    """What a forward returns."""
    outputs = {"loss": (values, weights), "mean": values}
    return {name: outputs[name] for name in suite}


def evaluated(shares, cuts, *, interrupted, by_wire, suite=SUITE):
    """One tally from the batches of all ranks."""
    tallies = []
    for rank, (values, weights) in enumerate(shares):
        tally = no_tally(suite)
        bounds = [0, *cuts[rank], len(values)]
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            tally = observe(suite, tally, given_to(suite, values[start:stop], weights[start:stop]))
            if (rank, index) == interrupted:
                tally = saved(tally)
        tallies.append(tally)
    if by_wire:
        layouts = [layout_of(suite, tally, world_size=len(tallies)) for tally in tallies]
        check_same_suite(layouts)
        summed = sum(vector_of(tally, layouts, rank) for rank, tally in enumerate(tallies))
        return tally_of(suite, tallies[0], layouts, summed, batches=sum(tally.batches for tally in tallies))
    total = no_tally(suite)
    for tally in tallies:
        total = merge_tallies(suite, tally, total)
    return total


def same_bits(one, other):
    if one is None or other is None:
        return one is other
    return one.hex() == other.hex()


def leaves_of(tally: Tally):
    return [leaf.tolist() for leaf in tree.leaves(tally.accumulators)]


@contextlib.contextmanager
def small_limits(seed):
    """In half of the cases, Python adds no sum itself; in half of these, some terms span several blocks."""
    with contextlib.ExitStack() as stack:
        if seed % 2:
            stack.enter_context(mock.patch.object(cpu_sum, "_FEW", 0))
        if seed % 4 == 3:
            stack.enter_context(mock.patch.object(cpu_sum, "BLOCK", 16))
        yield


def check_case(seed):
    """One random case: terms, dtype, order, ranks, batches, interruption. Checks the bits of result and accumulator."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([0, 1, 2, 5, 17, 60, 300, 1500], p=[0.03, 0.08, 0.12, 0.25, 0.27, 0.19, 0.05, 0.01]))
    values = values_of(rng, rng.choice(KINDS), FLOATS[rng.integers(len(FLOATS))], count)
    signs = rng.integers(0, 9, count) if rng.random() < 0.8 else rng.integers(-4, 5, count)
    weights = torch.from_numpy(signs)
    if rng.random() < 0.3:
        weights = weights.double() / 8
    world = int(rng.integers(1, 9))
    order = torch.from_numpy(rng.permutation(count))
    ends = np.sort(rng.integers(0, count + 1, world - 1)).tolist()
    shares = list(zip(values[order].tensor_split(ends), weights[order].tensor_split(ends), strict=True))
    cuts = [np.sort(rng.integers(0, len(part) + 1, rng.integers(0, 4))).tolist() for part, _ in shares]
    interrupted = (int(rng.integers(world)), int(rng.integers(3)))
    suite = WITH_MEAN if seed % 8 in {0, 1} else SUITE
    with small_limits(seed):
        tally = evaluated(shares, cuts, interrupted=interrupted, by_wire=rng.random() < 0.5, suite=suite)
        whole = observe(suite, no_tally(suite), given_to(suite, values, weights))
    found = results_of(suite, tally)
    for name in suite:
        wanted = oracle(values, weights if name == "loss" else torch.ones(count))
        assert same_bits(found.get(name), wanted), (seed, name, found, wanted)
    assert leaves_of(tally) == leaves_of(merge_tallies(suite, whole, no_tally(suite))), seed


@pytest.mark.timeout(0 if RANDOM_CASES > 100_000 else 300)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_cases_have_the_bits_of_the_fractions(block):
    """Q01, Q02, Q03, P16: values, dtype, partition, order, ranks 1 to 8, empty ranks, interruption."""
    torch.set_num_threads(1)
    size = RANDOM_CASES // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        check_case(seed)


def test_random_cases_reach_every_way_of_adding():
    """The share of each path in 200 cases: sums in Python, rows, windows and bins."""
    ways = [(cpu_sum, "_sum_of_few"), (terms, "_rows"), (terms, "_windows"), (cpu_sum, "bins_of")]
    reached = Counter()
    for seed in range(200):
        with contextlib.ExitStack() as stack:
            spies = {
                name: stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
                for module, name in ways
            }
            check_case(seed)
        reached.update(name for name, spy in spies.items() if spy.called)
    assert set(reached) == {name for _, name in ways}
    assert min(reached.values()) > 20, reached


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(FLOATS))
    width = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}[dtype]
    numbers = draw(st.lists(st.floats(width=width), max_size=25))
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    weights = torch.tensor(draw(st.lists(st.integers(-3, 9), min_size=len(values), max_size=len(values))))
    world = draw(st.integers(1, 8))
    order = torch.tensor(draw(st.permutations(range(len(values)))), dtype=torch.int64)
    bound = st.integers(0, len(values))
    ends = draw(st.lists(bound, min_size=world - 1, max_size=world - 1).map(sorted))
    shares = list(zip(values[order].tensor_split(ends), weights.long()[order].tensor_split(ends), strict=True))
    cuts = [draw(st.lists(st.integers(0, len(part)), max_size=2).map(sorted)) for part, _ in shares]
    interrupted = (draw(st.integers(0, world - 1)), draw(st.integers(0, 2)))
    return values, weights.long(), shares, cuts, interrupted, draw(st.booleans())


@pytest.mark.timeout(0 if EXAMPLES > 10_000 else 300)
@settings(
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases())
def test_any_case_has_the_bits_of_the_fractions(case):
    """Q01, Q02, Q03, P16: any case that Hypothesis generates, including NaN and infinities."""
    values, weights, shares, cuts, interrupted, by_wire = case
    tally = evaluated(shares, cuts, interrupted=interrupted, by_wire=by_wire)
    assert same_bits(results_of(SUITE, tally).get("loss"), oracle(values, weights))
    whole = observe(SUITE, no_tally(SUITE), {"loss": (values, weights)})
    assert leaves_of(tally) == leaves_of(merge_tallies(SUITE, whole, no_tally(SUITE)))

"""`evaluate(..., chunk=32)`: a deterministic forward gives the same bits, even if its kernels depend on the batch size."""

import itertools
import re
from collections import UserDict

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import trainfold
from trainfold import metrics as M
from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.data.chunks import columns_of, joined
from trainfold.core.data.eval_cursor import eval_batches, make_eval_cursor
from trainfold.core.errors import InvalidArgument, InvalidBatch, RanksDisagree
from trainfold.core.state.state import TrainState, make_progress

FEWER = settings(max_examples=settings().max_examples * 3 // 10)  # of the profile's: each runs several worlds
SUITE = {"loss": M.Ratio(), "worst": M.Max(), "calls": M.Sum()}


def make_data(length):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, 5, generator=generator)
    return {"x": x, "y": x[:, 0].double().numpy(), "text": [f"{number}" for number in range(length)]}


def rows(data, positions):
    part = slice(positions.start, positions.stop)
    return {"x": data["x"][part], "y": data["y"][part], "text": data["text"][part]}


def forward(batch):
    """Rounds each row differently if the number of rows, the strides or the alignment of the memory differ."""
    x, y = batch["x"], torch.from_numpy(batch["y"])
    assert len(x) == len(y) == len(batch["text"])
    odd = len(x) + 7 * (x.data_ptr() % 64 != 0) + 13 * (y.data_ptr() % 64 != 0) + 29 * (x.stride() != (5, 1))
    loss = (x.sum(1) + y + torch.tensor([float(text) for text in batch["text"]])) * (1 + odd / 3)
    return {"loss": (loss, len(loss)), "worst": loss, "calls": torch.ones(1)}


def bits(found):
    return {name: value.hex() for name, value in found.items()}


def in_chunks(data, length, chunk):
    """The expected result: the chunks themselves, each in its own memory."""
    cuts = [rows(data, range(start, min(start + chunk, length))) for start in range(0, length, chunk)]
    whole = [{"x": cut["x"].clone(), "y": joined([columns_of(cut["y"])]), "text": cut["text"]} for cut in cuts]
    return bits(evaluate(forward, whole, SUITE))


lengths, chunks = st.integers(0, 40), st.integers(1, 9)


@given(length=lengths, chunk=chunks, cuts=st.lists(st.integers(0, 12), max_size=50), data=st.data())
def test_no_batches_of_a_loader_change_a_bit_in_chunks(length, chunk, cuts, data):
    """P16: any split into batches, including empty ones; tensors, arrays and texts; views with unusual strides."""
    whole = make_data(length)
    if data.draw(st.booleans(), "transposed"):
        whole["x"] = whole["x"].t().contiguous().t()
    edges = sorted({0, length, *(min(edge, length) for edge in itertools.accumulate(cuts))})
    batches = [rows(whole, range(*pair)) for pair in itertools.pairwise(edges)]
    found = evaluate(forward, batches, SUITE, chunk=chunk)
    assert bits(found) == in_chunks(make_data(length), length, chunk)
    assert found.complete
    assert found.batches == -(-length // chunk)


@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_a_forward_sees_the_same_strides_whatever_the_batches_are(size):
    """P16: a contiguous tensor has arbitrary strides in dimensions of size 1, e.g. one-channel channels_last images."""
    images = torch.randn(40, 1, 5, 5)
    seen = set()

    def forward(batch):
        seen.add(batch.stride())
        return {"loss": (batch.sum((1, 2, 3)), len(batch))}

    batches = [torch.empty_strided(each.shape, (25, 1, 5, 1)).copy_(each) for each in images.split(size)]
    evaluate(forward, batches, {"loss": M.Ratio()}, chunk=8)
    assert seen == {(25, 25, 5, 1)}


@FEWER
@given(
    length=lengths,
    chunk=chunks,
    parts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.sampled_from(["limit", "steps", "odd"])),
        min_size=1,
        max_size=4,
    ),
)
def test_no_ranks_sizes_or_interruptions_change_a_bit_in_chunks(length, chunk, parts):
    """P16, Q01: parts on any world size, cut at a cursor step, at a call of the forward or inside a chunk, and saved between."""
    whole, store, tally, seen = make_data(length), MemoryStore(), None, 0
    for world_size, times, limit, how in [*parts, (2, 1, None, "limit")]:
        alone = how != "limit"  # ranks that run together can only be cut at a step

        def work(ranks, times=times, limit=limit, how=how, alone=alone, tally=tally, seen=seen):
            size = max(1, chunk * times - (how == "odd"))
            cursor = make_eval_cursor(length, global_batch_size=size, next_index=seen)
            batches = eval_batches(
                cursor,
                lambda mine: rows(whole, mine),
                collectives=ranks,
                limit=None if how == "steps" else limit,
                chunk=1 if alone else chunk,
            )
            steps = limit if how == "steps" else None
            return evaluate(forward, batches, SUITE, collectives=ranks, start=tally, steps=steps, chunk=chunk)

        found, *others = run_threads(1 if alone else world_size, work)
        assert all(bits(other) == bits(found) for other in others)
        assert found.tally.next_index >= 0
        assert found.tally.next_index in (seen, length) or found.tally.next_index % chunk == 0
        assert found.complete == (found.tally.next_index == length)
        saved = TrainState(trainer=make_progress(step=1), extra={"tally": found.tally})
        save(saved, store)
        tally = load(store, like=TrainState(trainer=make_progress())).extra["tally"]
        seen = tally.next_index
    assert bits(found) == in_chunks(whole, length, chunk)


def test_real_models_have_the_same_bits_at_every_batch_size_in_chunks_and_not_without():
    """P16: README promises it. The plain loops of ten models show that the test is not vacuous."""
    differ = 0
    for seed in range(10):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(37, 96), torch.nn.GELU(), torch.nn.Linear(96, 11)).eval()
        x = torch.randn(200, 37)

        def nll(batch, model=model):
            return {"loss": (model(batch).logsumexp(1), len(batch))}

        suite = {"loss": M.Ratio()}
        plain = {evaluate(nll, x.split(size), suite)["loss"].hex() for size in (1, 7, 64)}
        differ += len(plain) > 1
        cut = {evaluate(nll, x.split(size), suite, chunk=32)["loss"].hex() for size in (1, 7, 32, 64, 200)}
        for world_size in (1, 2, 4) if seed == 0 else ():

            def work(ranks, nll=nll, x=x, suite=suite):
                fetch, cursor = lambda mine: x[mine.start : mine.stop], make_eval_cursor(200, global_batch_size=128)
                batches = eval_batches(cursor, fetch, collectives=ranks, chunk=32)
                return evaluate(nll, batches, suite, collectives=ranks, chunk=32)["loss"].hex()

            cut |= set(run_threads(world_size, work))
        assert len(cut) == 1
    assert differ > 0


def test_a_rank_without_a_share_waits_for_nobody_and_steps_count_chunks():
    """Q05: a forward that communicates is called the same number of times on every rank."""
    whole, calls = make_data(50), []

    def work(ranks):
        cursor = make_eval_cursor(50, global_batch_size=16)
        batches = eval_batches(cursor, lambda mine: rows(whole, mine), collectives=ranks, chunk=8)

        def together(batch):
            calls.append(len(ranks.gather(None)))
            return forward(batch)

        return bits(evaluate(together, batches, SUITE, collectives=ranks, chunk=8, steps=4))

    assert run_threads(3, work) == [in_chunks(whole, 50, 8)] * 3
    assert len(calls) == 3 * 4


def test_a_place_without_a_value_stays_one_and_a_view_of_conjugates_is_made_whole():
    """Q05: a missing mask is accepted, and one batch gives the same form as two."""
    whole = make_data(20)
    found = evaluate(
        forward,
        ({**rows(whole, range(i, min(i + 7, 20))), "m": None} for i in range(0, 20, 7)),
        SUITE,
        chunk=8,
    )
    assert bits(found) == in_chunks(whole, 20, 8)
    values = torch.view_as_complex(torch.randn(4, 2)).conj()
    for pieces in ([values], [values[:1], values[1:]]):
        made = joined([columns_of(piece) for piece in pieces])
        assert made.equal(values)
        assert not made.is_conj()


# --- batches that cannot be split are refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": torch.ones(3), "width": 7}, r"batch\['width'\].*int that cannot be cut"),
        ({"x": torch.ones(3), "y": torch.ones(2)}, r"batch\['x'\]': '3 samples'.*batch\['y'\]\": '2 samples'|3 samples.*2 samples"),
        ({"x": torch.ones(3), "y": torch.tensor(1.0)}, "cannot be cut"),
        ({}, "no leaf"),
        ({"x": None}, "no leaf"),
        (UserDict(x=torch.ones(3)), r"a UserDict that cannot be cut.*map\(dict, loader\)"),
        (torch.eye(3).to_sparse(), "plain memory"),
    ],
)  # fmt: skip
def test_batches_that_have_no_samples_to_cut_are_refused_by_name(batch, named):
    with pytest.raises((InvalidBatch, InvalidArgument), match=named):
        evaluate(lambda batch: {}, [batch], SUITE, chunk=4)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"x": torch.ones(3, 5)}, {"x": torch.ones(3, 4)}, r"batch\['x'\].*\[5\].*\[4\].*pad samples"),
        ({"x": torch.ones(3)}, {"x": torch.ones(3).double()}, "float32.*float64"),
        ({"x": np.ones(3)}, {"x": np.ones(3, dtype="int64")}, "float64.*int64"),
        ({"x": torch.ones(3)}, (torch.ones(3),), "joined"),
        ({"x": ["a"]}, {"x": ("a",)}, "list.*tuple"),
        ({"x": torch.ones(1)}, {"x": ["a"]}, "float32.*list"),
        ({"x": torch.ones(1), "m": torch.ones(1)}, {"x": torch.ones(1), "m": None}, r"batch\['m'\].*float32.*None"),
    ],
)
def test_batches_that_cannot_be_joined_are_refused_by_name(one, other, named):
    with pytest.raises(InvalidBatch, match=named):
        evaluate(lambda batch: {}, [one, other], SUITE, chunk=4)


def told(ranks, **changes):
    """The value that rank 0 gets for a chunk of 4."""
    size, index = changes.pop("size", 8), changes.pop("index", 0)
    cursor = make_eval_cursor(20, global_batch_size=size, next_index=index)
    data = make_data(20)
    batches = eval_batches(
        cursor, lambda mine: rows(data, mine), collectives=ranks, chunk=changes.pop("shares", 1), limit=changes.pop("limit", None)
    )  # fmt: skip
    batches = changes.pop("wrap", lambda each: each)(batches)
    return evaluate(forward, batches, SUITE, collectives=ranks, **{"chunk": 4, **changes})


class Other:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize(
    ("world_size", "changes", "named"),
    [
        (2, {}, r"shares that may begin inside a chunk.*eval_batches\(cursor, fetch, collectives=..., chunk=4\)"),
        (2, {"wrap": list}, "samples have no known index.*eval_batches"),
        (2, {"shares": 4, "size": 10}, "multiple of chunk=4.*global_batch_size=12"),
        (2, {"shares": 4, "index": 6}, "begins at a multiple of chunk=4.*next_index=4"),
        (1, {"index": 6}, "begins at a multiple of chunk=4"),
        (1, {"chunk": 0}, "chunk: expected a number of samples"),
        (1, {"chunk": True}, "chunk: expected a number of samples"),
        (1, {"shares": 0}, "eval_batches.chunk"),
        (1, {"wrap": lambda each: [next(iter(each)), *each]}, None),
        (1, {"wrap": lambda each: ({"x": batch["x"][:3]} for batch in each)}, "8 samples .*fetch was asked for.*3 samples"),
        (1, {"wrap": lambda each: itertools.chain(each, each)}, "batch 4: expected no more batches than the 3"),
        (1, {"size": 5, "wrap": lambda each: itertools.islice(each, 1, None)}, "3 of the 4 that it gave"),
    ],
)  # fmt: skip
def test_what_has_no_known_index_is_refused_with_the_cure(world_size, changes, named):
    outcomes = thread_outcomes(world_size, lambda ranks: told(ranks, **changes))
    errors = [outcome.error for outcome in outcomes]
    if named is None:
        assert errors == [None]
    else:
        assert isinstance(errors[0], (InvalidArgument, InvalidBatch))
        assert re.search(named, str(errors[0]), re.DOTALL), errors[0]
        assert all(errors)


def test_parts_with_other_chunks_do_not_make_a_whole():
    """The tally records its chunk size: another size for the rest would silently change the bits."""
    data, first = make_data(20), run_threads(1, lambda ranks: told(ranks, limit=1))[0]
    assert (first.tally.next_index, first.tally.chunk, first.complete) == (8, 4, False)
    cursor = make_eval_cursor(20, global_batch_size=8, next_index=8)
    rest = eval_batches(cursor, lambda mine: rows(data, mine))
    for chunk, named in ((8, "chunks of 8.*chunks of 4"), (None, "as they were given.*chunks of 4")):
        with pytest.raises(InvalidArgument, match=named):
            evaluate(forward, rest, SUITE, start=first.tally, chunk=chunk)
    whole = evaluate(forward, rest, SUITE, start=first.tally, chunk=4)
    assert bits(whole) == in_chunks(data, 20, 4)
    with pytest.raises(InvalidArgument, match="goes on"):
        evaluate(forward, list(rest), SUITE, start=first.tally, chunk=4)
    with pytest.raises(InvalidArgument, match="as they were given"):
        evaluate(forward, rest, SUITE, start=attrs.evolve(first.tally, chunk=0), chunk=4)


def test_ranks_that_cut_otherwise_disagree():
    errors = [
        outcome.error for outcome in thread_outcomes(2, lambda ranks: told(ranks, shares=4, chunk=2 + 2 * ranks.rank))
    ]
    assert all(isinstance(error, RanksDisagree) and "chunk" in str(error) for error in errors)


def test_a_limit_of_time_on_batches_in_chunks_is_partial():
    """Q12: a time limit cuts at an unknown place, so the result ends with a whole chunk and cannot be continued."""
    seconds = itertools.count()
    data = make_data(20)
    batches = eval_batches(make_eval_cursor(20, global_batch_size=6), lambda mine: rows(data, mine))
    limited = trainfold.evaluation.time_limit(batches, secs=2.5, clock=lambda: next(seconds))
    found = evaluate(forward, limited, SUITE, chunk=4)
    assert (found.complete, found.tally.next_index, found.batches) == (False, -1, 4)


@given(length=st.integers(1, 20), data=st.data())
def test_a_batch_is_its_parts_joined_again(length, data):
    whole = make_data(length)
    edges = sorted({0, length, *data.draw(st.lists(st.integers(0, length)), "edges")})
    assume(len(edges) > 1)
    columns = columns_of((whole, [f"{n}" for n in range(length)]))
    again, texts = joined([columns.part(*pair) for pair in itertools.pairwise(edges)])
    assert torch.equal(again["x"], whole["x"])
    assert np.array_equal(again["y"], whole["y"])
    assert again["text"] == whole["text"] == texts

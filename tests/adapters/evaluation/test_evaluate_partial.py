"""Partial evaluations, starts of another kind, and ranks that disagree or are interrupted."""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import os
import subprocess
import sys
import types
import weakref

import attrs
import numpy as np
import pytest
import torch
from kit.adapters.evaluate_cases import GLOBAL_MODEL, SUM, Chain, Counting, Fielded, batches_of, deep, numbers, summed

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core.errors import InvalidArgument, RankFailed, RanksDisagree
from trainfold.core.exact.sum import exact_add, exact_zero
from trainfold.core.metrics.metric import metric_text


def test_a_limit_of_time_around_a_part_does_not_make_it_whole():
    """Q12: the result is complete if both of them are; the place of a time limit is not a position."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=2)
    part = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], limit=2)
    found = trainfold.evaluate(summed, trainfold.evaluation.time_limit(part, secs=3600), SUM)
    assert not found.complete
    ticks = itertools.count()
    cut = trainfold.evaluation.time_limit(
        trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop]),
        secs=3,
        clock=lambda: next(ticks),
    )
    assert not trainfold.evaluate(summed, cut, SUM).complete
    with pytest.raises(AttributeError, match="time was up"):
        _ = cut.after


def test_a_partial_result_stays_partial_in_copies_and_by_its_tally():
    """Q12: whatever is made of it."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=2)
    part = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], limit=2)
    found = trainfold.evaluate(summed, part, SUM)
    record = trainfold.retention.make_best_record(metric="sum", direction="max")
    for each in (found, found.copy(), found | {"more": 1.0}, trainfold.evaluation.evaluation_of(SUM, found.tally)):
        assert not each.complete
        assert each["sum"] == 6.0
        assert not trainfold.retention.is_better(record, each)
    assert "partial" in repr(found)
    rest = trainfold.evaluation.eval_batches(part.after, lambda at: numbers()[at.start : at.stop])
    whole = trainfold.evaluate(summed, rest, SUM, start=found.tally)
    assert whole.complete
    assert repr(whole) == "{'sum': 190.0}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (M.TopK(1), M.TopK(5)),
        (M.Histogram((0, 1, 2)), M.Histogram((0, 10, 20))),
        (M.Mean(), M.Max()),
    ],
)
def test_a_start_of_another_metric_of_the_same_name_is_refused(before, after):
    """P30: its accumulator would be merged although it means something else."""
    tally = trainfold.evaluation.no_tally({"m": before})
    with pytest.raises(InvalidArgument, match="start") as caught:
        trainfold.evaluate(summed, [], {"m": after}, start=tally)
    assert type(before).__name__ in str(caught.value)
    assert type(after).__name__ in str(caught.value)


def test_batches_of_other_ranks_or_of_another_position_are_refused():
    """Q01: a cursor made twice, or without the ranks, does not count samples twice."""

    def work(ranks, kind):
        size = 4 + ranks.rank if kind == "batch size" else 4
        at = 4 * ranks.rank if kind == "position" else 0
        cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=size, next_index=at)
        of = None if kind == "without ranks" else ranks
        batches = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], collectives=of)
        return trainfold.evaluate(summed, batches, SUM, collectives=None if kind == "alone" else ranks)

    for kind in ("batch size", "position", "without ranks"):
        errors = [type(outcome.error) for outcome in thread_outcomes(2, functools.partial(work, kind=kind))]
        assert errors in ([RanksDisagree] * 2, [InvalidArgument] * 2), kind
    assert [type(outcome.error) for outcome in thread_outcomes(2, functools.partial(work, kind="alone"))] == [
        InvalidArgument
    ] * 2


def test_an_evaluation_that_begins_late_and_has_no_start_is_partial():
    """P30: half of the data is not all of it."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4, next_index=8)
    batches = trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop])
    assert not trainfold.evaluate(summed, batches, SUM).complete
    assert not trainfold.evaluate(summed, batches, SUM, start=trainfold.evaluation.no_tally(SUM)).complete


def test_steps_on_some_ranks_only_are_a_disagreement_on_every_rank():
    outcomes = thread_outcomes(
        2,
        lambda ranks: trainfold.evaluate(summed, [numbers()], SUM, collectives=ranks, steps=2 if ranks.rank else None),
    )
    assert [type(outcome.error) for outcome in outcomes] == [RanksDisagree] * 2


class Exit(BaseException):
    pass


@pytest.mark.parametrize("where", ["forward", "loader", "metric"])
@pytest.mark.parametrize("steps", [None, 3])
def test_an_interrupt_on_one_rank_is_told_to_the_others(where, steps):
    """Q03: KeyboardInterrupt and similar exceptions, wherever they occur."""

    class Interrupting:
        def __init__(self):
            self.sum = M.Sum()

        def __getattr__(self, name):
            return getattr(self.sum, name)

        def observe(self, acc, values):
            if values[0] == 99:
                raise Exit
            return self.sum.observe(acc, values)

    def work(ranks):
        def loader():
            for index in range(3):
                if (ranks.rank, index, where) == (1, 1, "loader"):
                    raise Exit
                yield torch.full((2,), 99.0 if (ranks.rank, index, where) == (1, 1, "metric") else 1.0)

        def forward(batch):
            if (ranks.rank, where) == (1, "forward"):
                raise Exit
            if steps:
                ranks.all_sum([batch])
            return {"sum": batch}

        return trainfold.evaluate(forward, loader(), {"sum": Interrupting()}, collectives=ranks, steps=steps)

    outcomes = thread_outcomes(2, work, timeout_secs=10)
    assert [type(outcome.error) for outcome in outcomes] == [RankFailed, Exit]


class Merging(torch.nn.Linear):
    """As LoRA layers do it: evaluation mode merges two weights into one, training mode takes them apart."""

    merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.weight += -1.0 if mode else 1.0
            self.merged = not mode
        return self


def test_a_module_with_a_train_of_its_own_is_put_back_by_it():
    """Q06: it undoes its own changes for the evaluation."""
    model = torch.nn.Sequential(Merging(1, 1), Merging(1, 1))
    model[1].eval()
    before = [part.weight.item() for part in model]
    inside = []

    def forward(batch):
        inside.append([part.merged for part in model])
        return {"sum": model(batch)}

    trainfold.evaluate(forward, [torch.ones(1, 1)], SUM)
    assert inside == [[True, True]]
    assert [part.merged for part in model] == [False, True]
    assert [part.training for part in model] == [True, False]
    assert [part.weight.item() for part in model] == before


@pytest.mark.parametrize("kind", ["attributes", "dicts", "class", "weakref", "module", "deque"])
def test_modules_are_found_in_all_that_forward_and_its_helpers_hold(kind):
    """Q06: dropout is off in an evaluation."""
    model = Counting()
    trainfold.evaluate(deep(model, kind), batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert model.seen == [(False, False, False)]
    assert model.training


def test_a_model_too_deep_to_be_found_is_warned_of_and_named_by_hand():
    """Q06: one warning names the objects not searched; a model given with modules= is evaluated without a warning."""
    model, criterion = Counting(), torch.nn.MSELoss()
    held = Chain(Chain(Chain(Chain(model))))

    def forward(batch):
        return {"loss": (criterion(held.inner.inner.inner.inner(batch), batch["values"]), 1)}

    batches = batches_of(torch.ones(2), [])
    with pytest.warns(UserWarning, match=r"found no model in forward, .*did not look into Chain: .*modules=\[model\]"):
        trainfold.evaluate(forward, batches, {"loss": M.Ratio()})
    assert model.seen == [(True, True, False)]
    trainfold.evaluate(forward, batches, {"loss": M.Ratio()}, modules=[model])
    assert model.seen[1:] == [(False, False, False)]
    assert model.training


def test_a_module_whose_hash_changes_is_put_back():
    """Q06: as that of a metric of torchmetrics, whose hash is made of its states."""

    class Counter(Counting):
        def __hash__(self):
            return hash(len(self.seen)) if "seen" in vars(self) else 0

    model = Counter()
    trainfold.evaluate(lambda batch: {"loss": (model(batch), 1)}, batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert model.seen == [(False, False, False)]
    assert model.training


def test_a_generator_behind_a_generator_is_put_back():
    """Q06: wrappers are searched if their content can be found."""
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=4, shuffle=True, generator=generator)
    batches = (batch for batch in loader)
    before = generator.get_state()
    trainfold.evaluate(lambda batch: {"sum": batch}, batches, SUM)
    assert torch.equal(generator.get_state(), before)


def test_metrics_that_are_equal_are_equal_on_every_rank_whatever_their_repr():
    found = run_threads(
        2, lambda ranks: trainfold.evaluate(summed, [numbers(3)], {"sum": Fielded()}, collectives=ranks)
    )
    assert found == [{"sum": 6.0}] * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"forward": None}, "forward"),
        ({"batches": None}, "batches"),
        ({"modules": 3}, "modules"),
        ({"modules": [None]}, "modules"),
    ],
)
def test_arguments_that_cannot_be_are_named(changes, named):
    given = {"forward": summed, "batches": [numbers()], "suite": SUM, **changes}
    with pytest.raises(InvalidArgument, match=named):
        trainfold.evaluate(given.pop("forward"), given.pop("batches"), given.pop("suite"), **given)


def test_what_cannot_go_on_is_refused_before_anything_is_evaluated():
    """No user should wait hours for the error that the suites differ."""
    called = []

    def counting(batch):
        called.append(batch)
        return {"m": batch}

    with pytest.raises(InvalidArgument, match="start"):
        trainfold.evaluate(counting, [numbers()], {"m": M.Max()}, start=trainfold.evaluation.no_tally({"m": M.Min()}))
    suites = [{"m": M.Max()}, {"m": M.Min()}]
    outcomes = thread_outcomes(
        2, lambda ranks: trainfold.evaluate(counting, [numbers()], suites[ranks.rank], collectives=ranks)
    )
    assert [type(outcome.error) for outcome in outcomes] == [RanksDisagree] * 2
    assert called == []


class OldSequence:
    """Iterated over by index, as datasets are."""

    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return torch.tensor(float(index))


def test_batches_may_be_anything_that_can_be_iterated_over():
    assert trainfold.evaluate(summed, OldSequence(), SUM) == {"sum": 3.0}


def part_of(cursor, limit=None):
    return trainfold.evaluation.eval_batches(cursor, lambda at: numbers()[at.start : at.stop], limit=limit)


def test_a_start_has_to_end_where_the_batches_begin():
    """P30: neither a gap nor a sample twice."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4)
    half = trainfold.evaluate(summed, part_of(cursor, limit=2), SUM)
    for at in (0, 12):
        other = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4, next_index=at)
        with pytest.raises(InvalidArgument, match="sample 8"):
            trainfold.evaluate(summed, part_of(other), SUM, start=half.tally)
    assert not trainfold.evaluate(summed, [], SUM, start=half.tally).complete
    assert trainfold.evaluate(summed, part_of(cursor.advance(2)), SUM, start=half.tally).complete


def enumerate_less(part):
    yield from part


class Bar:
    def __init__(self, iterable):
        self.iterable = iterable

    def __iter__(self):
        return iter(self.iterable)


@pytest.mark.parametrize(
    "wrapped",
    [
        functools.partial(map, torch.clone),
        iter,
        lambda part: (batch for batch in part),
        enumerate_less,
        Bar,
    ],
)
def test_a_part_behind_a_wrapper_is_still_a_part(wrapped):
    """Q12: a progress bar or a map hides it."""
    cursor = trainfold.evaluation.make_eval_cursor(20, global_batch_size=4)
    assert not trainfold.evaluate(summed, wrapped(part_of(cursor, limit=2)), SUM).complete
    assert trainfold.evaluate(summed, wrapped(part_of(cursor)), SUM).complete
    ticks = itertools.count()
    cut = trainfold.evaluation.time_limit([numbers()] * 9, secs=3, clock=lambda: next(ticks))
    assert not trainfold.evaluate(summed, wrapped(cut), SUM).complete


class Unspeakable(ValueError):
    def __str__(self):
        raise RuntimeError("nothing to say")


def test_an_error_that_cannot_be_shown_is_told_all_the_same():
    def work(ranks):
        def bad(batch):
            if ranks.rank == 1:
                raise Unspeakable
            return {"sum": batch}

        return trainfold.evaluate(bad, [numbers()], SUM, collectives=ranks)

    outcomes = thread_outcomes(2, work, timeout_secs=10)
    assert [type(outcome.error) for outcome in outcomes] == [RankFailed, Unspeakable]
    assert "rank 1: Unspeakable" in str(outcomes[0].error)


def test_a_failure_to_put_things_back_is_told():
    """Q03, Q06: the other ranks do not wait for the sum."""

    class Stuck(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise OSError("stuck")

    caught = []

    def work(ranks):
        try:
            return trainfold.evaluate(summed, Stuck([numbers()]) if ranks.rank else [numbers()], SUM, collectives=ranks)
        except (OSError, RankFailed) as error:
            caught.append(type(error))
            return None  # and lives on

    run_threads(2, work, timeout_secs=10)
    assert sorted(kind.__name__ for kind in caught) == ["OSError", "RankFailed"]


def test_collectives_are_as_good_as_before_when_every_rank_knew():
    def work(ranks):
        with pytest.raises((InvalidArgument, RankFailed)):
            trainfold.evaluate(summed, [numbers()], SUM if ranks.rank else {}, collectives=ranks)
        return trainfold.evaluate(summed, [numbers(3)], SUM, collectives=ranks)

    assert run_threads(2, work) == [{"sum": 6.0}] * 2


def by_global_name(batch):
    return {"loss": (GLOBAL_MODEL(batch), 1)}


class Base:
    def helper(self, batch):
        return by_global_name(batch)


class Measuring(Base):
    def __call__(self, batch):
        return self.helper(batch)

    def measure(self, batch):
        return super().helper(batch)

    @property
    def model(self):
        return GLOBAL_MODEL

    @staticmethod
    def still(batch):
        return by_global_name(batch)


def by_import(batch):
    import tests_of_a_model_module

    return {"loss": (tests_of_a_model_module.sub.net(batch), 1)}


@pytest.mark.parametrize("kind", ["call", "super", "property", "static", "import"])
def test_modules_named_by_what_a_function_calls_are_found(kind, monkeypatch):
    """Q06: through methods, properties, base classes and modules."""
    module = types.ModuleType("tests_of_a_model_module")
    module.sub = types.ModuleType("sub")
    module.sub.net = GLOBAL_MODEL
    monkeypatch.setitem(sys.modules, "tests_of_a_model_module", module)
    it = Measuring()
    forward = {
        "call": it,
        "super": it.measure,
        "property": lambda batch: {"loss": (it.model(batch), 1)},
        "static": Measuring.still,
        "import": by_import,
    }[kind]
    GLOBAL_MODEL.seen.clear()
    trainfold.evaluate(forward, batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert GLOBAL_MODEL.seen == [(False, False, False)]
    assert GLOBAL_MODEL.training


class Haunted:
    """What a search must not touch."""

    def __init__(self, model):
        self.gone = weakref.proxy(torch.nn.Linear(1, 1))
        self.lazy = Lazy()
        self.words = [["word"] * 4000 for _ in range(30)]
        self.samples = [{"text": "x"} for _ in range(4000)]
        self.deep = Chain(Chain(model))


class Lazy(dict):
    def values(self):
        raise AssertionError("computed")

    def __iter__(self):
        raise AssertionError("computed")

    @property
    def costly(self):
        raise AssertionError("computed")


def test_a_search_touches_nothing_and_is_not_stopped_by_data():
    model = Counting()
    it = Haunted(model)
    trainfold.evaluate(
        lambda batch: {"loss": (it.deep.inner.inner(batch), 1)},
        batches_of(torch.ones(2), []),
        {"loss": M.Ratio()},
    )
    assert model.seen == [(False, False, False)]


def test_a_module_with_one_mode_is_evaluated_in_it():
    exported = torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),)).module()
    found = trainfold.evaluate(lambda batch: {"sum": exported(batch)}, [torch.ones(1, 1)], SUM)
    assert len(found) == 1


def test_a_model_that_threads_share_is_put_back_when_the_last_one_is_done():
    """Q06: ranks as threads, as one tries things out."""
    for _ in range(10):
        model = Counting()
        model.inner[1].eval()

        def work(ranks, model=model):
            batches = batches_of(torch.ones(4), [1, 2])
            return trainfold.evaluate(lambda b: {"sum": model(b)}, batches, SUM, collectives=ranks)

        run_threads(3, work)
        assert (model.training, model.inner[0].training, model.inner[1].training) == (True, True, False)
        assert set(model.seen) == {(False, False, False)}


@attrs.frozen
class Weighted:
    weight: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Tagged:
    tags: frozenset


class Plain:
    def __init__(self, number):
        self.number = number


def scaled(factor):
    return lambda value: value * factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Weighted(torch.tensor([1.0] * 2000)), Weighted(torch.tensor([1.0] * 999 + [2.0] + [1.0] * 1000))),
        (Weighted(torch.tensor([1.00001])), Weighted(torch.tensor([1.00002]))),
        (Plain(1), Plain(5)),
        (Plain(scaled(2)), Plain(scaled(3))),
        (Tagged(frozenset("ab")), Tagged(frozenset("ac"))),
        (Plain(torch.float16), Plain(torch.float32)),
        (Plain(np.float32), Plain(np.float64)),
    ],
)
def test_metrics_that_differ_in_a_field_have_another_text(one, other):
    assert metric_text(one) != metric_text(other)
    assert metric_text(one) == metric_text(copy.deepcopy(one) if not callable(getattr(one, "number", None)) else one)


def test_the_text_of_a_metric_is_the_same_in_every_process():
    """A set of strings has another order in each process, in this one too."""
    script = (
        "import dataclasses\nfrom trainfold.core.metrics.metric import metric_text\n"
        "T = dataclasses.make_dataclass('T', ['tags'])\n"
        "print(metric_text(T(frozenset(['a', 'b', 'c', 'd', 'e']))))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(script, {})
    assert there == here.getvalue()


# --- what a third review found ---------------------------------------------------------------------------------------


class Ordinary(torch.Tensor):
    """A subclass that is plain memory."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.parametrize("count", [8, 100])
def test_tensors_that_are_not_plain_memory_are_refused(count):
    """Q02: a sum over their memory is not the sum of their values."""
    terms = torch.arange(float(count))
    for odd, named in (
        (torch.masked.masked_tensor(terms, terms < 3), "MaskedTensor"),
        (torch.nested.nested_tensor([terms, terms[:2]]), "nested"),
        (torch.nested.nested_tensor([terms, terms[:2]], layout=torch.jagged), "NestedTensor"),
        (terms.to_sparse(), "sparse"),
    ):
        for metric in (M.Mean(), Fielded()):
            with pytest.raises(InvalidArgument, match=f"forward returned for 'sum': .*{named}"):
                trainfold.evaluate(lambda _, odd=odd: {"sum": odd}, [0], {"sum": metric})
        with pytest.raises(InvalidArgument, match=named):
            M.Sum().observe(M.Sum().zero(), odd)
        with pytest.raises(InvalidArgument, match=named):
            exact_add(exact_zero(), odd)
    for plain in (torch.nn.Parameter(terms), terms.as_subclass(Ordinary)):
        assert trainfold.evaluate(summed, [plain], SUM) == {"sum": terms.sum().item()}

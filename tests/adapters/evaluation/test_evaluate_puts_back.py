"""An evaluation restores the modes, random streams and loaders that it touched, and can continue from a saved tally."""

import functools
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.evaluate_cases import GLOBAL_MODEL, SUITE, Counting, batches_of, bits, floats, forward

import trainfold
from trainfold import metrics as M
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, RanksDisagree
from trainfold.core.evaluate.evaluation import Evaluation


def of_global(batch):
    return {"loss": (GLOBAL_MODEL(batch), 1)}


def held_by(kind, model):
    class Trainer:
        def __init__(self):
            self.parts = {"model": model}

        def measure(self, batch):
            return {"loss": (self.parts["model"](batch), 1)}

        __call__ = measure

    return {
        "closure": lambda batch: {"loss": (model(batch), 1)},
        "partial": functools.partial(lambda m, batch: {"loss": (m(batch), 1)}, model),
        "method": Trainer().measure,
        "object": Trainer(),
        "default": lambda batch, m=model: {"loss": (m(batch), 1)},
        "inner function": lambda batch: {"loss": next((model(each), 1) for each in [batch])},
    }[kind]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["closure", "partial", "method", "object", "default", "inner function"])
def test_modules_are_in_evaluation_mode_and_come_back_as_they_were(kind, fails):
    """Q06, T61, M68: each submodule has its own mode, also if the evaluation raises."""
    model = Counting()
    model.inner[1].eval()
    batches = batches_of(torch.arange(4.0), [2])
    if fails:
        with pytest.raises(KeyError):
            trainfold.evaluate(held_by(kind, model), [*batches, {}], {"loss": M.Ratio()})
    else:
        trainfold.evaluate(held_by(kind, model), batches, {"loss": M.Ratio()})
    assert set(model.seen) == {(False, False, False)}
    assert model.training
    assert model.inner[0].training
    assert not model.inner[1].training
    assert torch.is_grad_enabled()


def test_a_module_that_a_function_names_is_found_and_one_that_cannot_be_is_given():
    GLOBAL_MODEL.seen.clear()
    trainfold.evaluate(of_global, batches_of(torch.ones(2), []), {"loss": M.Ratio()})
    assert GLOBAL_MODEL.seen == [(False, False, False)]
    assert GLOBAL_MODEL.training
    model, hidden = Counting(), [[[[[[None]]]]]]
    hidden[0][0][0][0][0][0] = model

    def deep(batch):
        return {"loss": (hidden[0][0][0][0][0][0](batch), 1)}

    trainfold.evaluate(deep, batches_of(torch.ones(2), []), {"loss": M.Ratio()}, modules=[model])
    assert model.seen == [(False, False, False)]
    assert model.training


def noisy(batch):
    random.random()
    np.random.rand(2)  # noqa: NPY002 the same
    return {"loss": (torch.rand(3), 1)}


@pytest.mark.parametrize("fails", [False, True])
def test_random_streams_and_grad_mode_are_put_back(fails):
    """Q06: a run with evaluations has the bits of one without."""

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002 the same

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 the stream that user code draws from
        torch.manual_seed(1)

    seed()
    expected = drawn()
    seed()

    def switching(batch):
        torch.set_grad_enabled(True)
        return noisy(batch) if not fails else {"nothing": noisy(batch)}

    with torch.no_grad():
        if fails:
            with pytest.raises(InvalidArgument):
                trainfold.evaluate(switching, [0], {"loss": M.Ratio()})
        else:
            trainfold.evaluate(switching, [0, 1], {"loss": M.Ratio()})
        assert not torch.is_grad_enabled()
    assert drawn() == expected


def test_a_loader_stands_where_it_stood():
    """Q06, P30: an evaluation changes neither the order of the next epoch nor a loader's own position."""
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=4, shuffle=True, generator=generator)
    before = generator.get_state()
    trainfold.evaluate(lambda batch: {"loss": (batch, len(batch))}, loader, {"loss": M.Ratio()})
    assert torch.equal(generator.get_state(), before)

    class Positioned:
        def __init__(self):
            self.position = 2

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

        def __iter__(self):
            while self.position < 5:
                self.position += 1
                yield torch.tensor(float(self.position))

    positioned = Positioned()

    def sometimes(batch):
        if batch == 4:
            raise ArithmeticError
        return {"loss": (batch, 1)}

    with pytest.raises(ArithmeticError):
        trainfold.evaluate(sometimes, positioned, {"loss": M.Ratio()})
    assert positioned.position == 2
    assert trainfold.evaluate(lambda batch: {"loss": (batch, 1)}, positioned, {"loss": M.Ratio()}) == {"loss": 4.0}
    assert positioned.position == 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_torchdata_loader_gives_each_evaluation_all_of_its_data():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 2):
        loader = stateful.StatefulDataLoader(list(range(10)), batch_size=3, num_workers=workers)
        for _ in range(2):
            found = trainfold.evaluate(lambda batch: {"sum": batch}, loader, {"sum": M.Sum()})
            assert found == {"sum": 45.0}
            assert found.batches == 4


@settings(deadline=None, max_examples=30)
@given(st.lists(floats, min_size=2, max_size=20), st.integers(1, 19), st.integers(1, 3), st.integers(1, 3))
def test_an_evaluation_goes_on_from_a_saved_tally(tmp_path_factory, values, cut, before, after):
    """Q01, P30: interrupted, saved in a checkpoint, loaded, and continued on other ranks: the same bits."""
    values = torch.tensor(values)
    first, rest = values[:cut], values[cut:]

    def part(ranks, share, start=None):
        mine = share.tensor_split(ranks.world_size)[ranks.rank]
        return trainfold.evaluate(forward, batches_of(mine, [2, 5]), SUITE, collectives=ranks, start=start)

    half = run_threads(before, lambda ranks: part(ranks, first))[0]
    state = trainfold.TrainState(
        **dict.fromkeys(["model", "optimizer", "scheduler", "dataset", "rng"]),
        trainer=trainfold.states.make_progress(step=1),
        extra={"evaluation": half.tally},
    )
    run = str(tmp_path_factory.mktemp("run"))
    trainfold.save(state, run)
    like = tree.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, state)
    tally = trainfold.load(run, like=like).extra["evaluation"]
    for found in run_threads(after, lambda ranks: part(ranks, rest, tally)):
        assert bits(found) == bits(trainfold.evaluate(forward, batches_of(values, []), SUITE))


def test_a_start_that_is_not_of_this_suite_or_not_the_same_everywhere_is_refused():
    one = trainfold.evaluate(forward, batches_of(torch.ones(2), []), SUITE).tally
    with pytest.raises(InvalidArgument, match="start"):
        trainfold.evaluate(forward, [], {"loss": M.Ratio()}, start=one)
    with pytest.raises(InvalidArgument, match="start"):
        trainfold.evaluate(forward, [], SUITE, start={"loss": 1})
    other = trainfold.evaluate(forward, batches_of(torch.zeros(2), []), SUITE).tally
    outcomes = thread_outcomes(
        2, lambda ranks: trainfold.evaluate(forward, [], SUITE, collectives=ranks, start=[one, other][ranks.rank])
    )
    assert all(isinstance(outcome.error, RanksDisagree) for outcome in outcomes)


def test_what_is_not_finite_is_counted_by_metric():
    """Q02: NaN and infinities are in the result and in the report."""
    batch = {"values": torch.tensor([1.0, math.nan, math.inf, -math.inf, math.inf]), "positions": 1}
    found = trainfold.evaluate(forward, [batch], SUITE)
    assert math.isnan(found["loss"])
    assert found.nonfinite["loss"] == {"nan": 1, "inf": 2, "-inf": 1}
    assert found.nonfinite["largest"] == {"nan": 1, "inf": 2, "-inf": 1}
    assert "positions" not in found.nonfinite


@pytest.mark.parametrize("suite", [None, {}, [], {1: M.Ratio()}, {"loss": M.Ratio}, {"loss": 3}])
def test_a_suite_that_is_none_is_refused(suite):
    with pytest.raises(InvalidArgument, match="suite"):
        trainfold.evaluate(forward, [], suite)


@pytest.mark.parametrize("outputs", [None, torch.ones(2), {"los": (1, 1)}, {"loss": (1, 1, 1)}])
def test_what_forward_returns_must_be_for_the_suite(outputs):
    with pytest.raises((InvalidArgument, TypeError)) as caught:
        trainfold.evaluate(lambda _: outputs, [0], {"loss": M.Ratio()})
    assert "loss" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))


class FloatMetric:
    """Not a monoid of integers."""

    def zero(self):
        return torch.zeros(1)

    def observe(self, acc, values):
        return acc + values.sum()

    def merge(self, one, other):
        return one + other

    def result(self, acc):
        return acc.item()


class Careless(FloatMetric):
    additive = True

    def zero(self):
        return torch.zeros(1, dtype=torch.int64)

    def observe(self, acc, values):
        return acc + 2**62


def test_accumulators_that_cannot_be_added_up_are_refused():
    """Q02: floats, and integers about to overflow, name the leaf."""
    with pytest.raises(InvalidState, match=r"accumulators\['loss'\]"):
        trainfold.evaluate(lambda _: {"loss": torch.ones(1)}, [0], {"loss": FloatMetric()})
    outcomes = thread_outcomes(
        4,
        lambda ranks: trainfold.evaluate(
            lambda _: {"loss": torch.ones(1)}, [0], {"loss": Careless()}, collectives=ranks
        ),
    )
    assert all(isinstance(outcome.error, InvalidState) for outcome in outcomes)


def test_an_evaluation_is_a_dict_that_says_what_it_is():
    found = trainfold.evaluate(forward, batches_of(torch.ones(4), [2]), SUITE)
    assert isinstance(found, Evaluation)
    assert isinstance(found, dict)
    assert found.batches == 2
    assert {**found}["loss"] == 1.0


def test_the_loss_of_an_evaluation_knows_nothing_of_accumulation():
    """Q10, F53: a sum over its weight, whatever the step divides by."""
    model = torch.nn.Linear(2, 1)
    sgd = trainfold.optimizer(torch.optim.SGD, lr=0.0)

    def loss_fn(model, batch):
        return trainfold.Loss(sum=model(batch["x"]).square().sum(), weight=len(batch["x"]))

    batch = {"x": torch.arange(16.0).view(8, 2)}
    state = trainfold.init_state(model, sgd)
    losses = set()
    for accumulate in (1, 2, 4):
        step = trainfold.make_step(model, loss_fn, sgd, accumulate=accumulate)
        state = trainfold.init_state(model, sgd)
        state, _ = step(state, batch)
        bound = trainfold.bind_model(model, state)

        def measure(batch, bound=bound):
            loss = loss_fn(bound, batch)
            return {"loss": (loss.sum, loss.weight)}

        losses.add(trainfold.evaluate(measure, [batch], {"loss": M.Ratio()})["loss"])
    assert len(losses) == 1


def test_an_evaluation_sees_the_step_that_it_is_of_and_all_samples_in_batches_of_its_own_size():
    """Q08: a loss that depends on the schedule; the remainder is counted."""
    x = torch.arange(11.0)
    state = trainfold.TrainState(trainer=trainfold.states.make_progress(step=0))
    found = []
    for step in range(3):
        state = state.evolve(trainer=trainfold.states.make_progress(step=step))

        def measure(batch, state=state):
            return {"loss": (batch * state.trainer.step, len(batch))}

        found.append(trainfold.evaluate(measure, x.split(4), {"loss": M.Ratio()})["loss"])
    assert found == [0.0, 5.0, 10.0]


def test_whether_to_evaluate_is_said_by_one_rank():
    """Q07: ranks with different configurations either all evaluate or all skip."""
    every = [2, 3, 5]

    def work(ranks):
        return [
            (step, trainfold.evaluate(forward, [], SUITE, collectives=ranks))
            for step in range(1, 7)
            if ranks.broadcast(step % every[ranks.rank] == 0)
        ]

    assert run_threads(3, work) == [[(2, {}), (4, {}), (6, {})]] * 3


def test_a_process_that_never_imported_metrics_reads_a_checkpoint_that_has_a_tally(tmp_path):
    """P30: any process that can read a checkpoint knows the classes of accumulators."""
    suite = {
        "f1": M.F1(2),
        "top": M.TopK(1),
        "median": M.Quantiles((0, 1), (0.5,)),
        "rate": M.AcceptanceRate(),
        **SUITE,
    }
    state = trainfold.TrainState(
        trainer=trainfold.states.make_progress(), extra={"evaluation": trainfold.evaluation.no_tally(suite)}
    )
    trainfold.save(state, tmp_path / "run")
    manifest = (tmp_path / "run" / "step-00000000" / "manifest.json").read_text()
    named = set(re.findall(r'"node": ?"(trainfold\.\w+)"', manifest))
    assert {"trainfold.Tally", "trainfold.Quotient", "trainfold.Bins"} <= named
    script = "from trainfold.core.format.structure.rebuild import classes_by_name; print(*classes_by_name())"
    known = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert named <= set(known)


# --- what a hostile review found -------------------------------------------------------------------------------------

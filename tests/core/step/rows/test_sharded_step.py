"""A step on a state that is cut by rows has the bits of a step on whole replicas, on any number of ranks; what does not fit is refused by name."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core.step_cases import assert_same_bits, make_batch, make_net, net_loss

from trainfold.backends.ranks.in_process import InjectedFailure, RankFault, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument, InvalidState, NonFinite, RankFailed, RanksDisagree, StateDonated
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard, make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.core.step.bind import bind_model
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.rows.by_rows import check_by_rows
from trainfold.core.step.rows.exchange_rows import gather_rows, sum_rows
from trainfold.core.step.step import make_step
from trainfold.ranks import Replicas, Sharded, SingleProcess, run_threads

OPTIMIZERS = {
    "sgd": optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": optimizer(torch.optim.AdamW, lr=0.05, groups=[(lambda _, p: p.shape[:1] == (7,), {"weight_decay": 0.3})]),
    "asgd": optimizer(torch.optim.ASGD, lr=0.05),
}
ADAMW = OPTIMIZERS["adamw"]


def train(ranks, model, opt, *, steps=3, **how):
    """The whole state at the end, and the metrics of each step."""
    state, step = init_state(model, opt), make_step(model, net_loss, opt, parallelism=ranks, **how)
    is_cut, rank, found = isinstance(ranks, Sharded), ranks.coordinates.data.rank, []
    state = ranks.cut(state) if is_cut else state
    for number in range(steps):
        state, metrics = step(state, make_batch(10 * number + rank, samples=6 + rank))
        found.append(metrics)
    return ranks.whole(state) if is_cut else state, found


@settings(max_examples=12)
@given(
    world=st.integers(1, 4),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    accumulate=st.integers(1, 3),
    donate=st.booleans(),
)
def test_a_cut_state_trains_with_the_bits_of_whole_replicas(world, kind, accumulate, donate):
    """A02, L06: on any number of ranks, with ties, a frozen part, groups by shape, empty and uneven parts; the norm agrees to rounding.

    Not with ``fused=True``: its kernel rounds the last elements of a tensor otherwise, and other elements are the last ones of a part.
    """
    model = make_net()

    def play(how):
        return run_threads(
            world, lambda ranks: train(how(ranks), model, OPTIMIZERS[kind], accumulate=accumulate, donate=donate)
        )

    for (cut, cut_metrics), (whole, whole_metrics) in zip(play(Sharded), play(Replicas), strict=True):
        assert_same_bits(cut, whole)
        for mine, theirs in zip(cut_metrics, whole_metrics, strict=True):
            assert math.isclose(mine.pop("grad_norm"), theirs.pop("grad_norm"), rel_tol=1e-6)
            assert mine == theirs


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=25)
@given(world=st.integers(1, 5), shapes=SHAPES, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_whole_is_the_inverse_of_cut(world, shapes, dtype):
    """A05: for every dtype and shape, NaN and -0.0 too; slots of another shape stay whole."""
    params = {f"w{index}": torch.randn(shape).to(dtype) for index, shape in enumerate(shapes)}
    for each in params.values():
        each.view(-1)[:2] = torch.tensor([-0.0, math.nan]).to(dtype)[: each.numel()]
    slots = {name: {"exp_avg": each + 1, "step": torch.tensor(3.0)} for name, each in params.items()}
    state = TrainState(
        ModelState(Leaves(params), Leaves({"mean": torch.ones(3)})),
        OptimizerState("k", Leaves(slots), (ParamGroup({"lr": 0.1}, tuple(params)),)),
        trainer=Progress(step=3),
    )

    def there_and_back(collectives):
        ranks = Sharded(collectives)
        cut = ranks.cut(state)
        held = sum(ranks.local(each).numel() for each in cut.model.params.values())
        return ranks.whole(cut), held

    found = run_threads(world, there_and_back)
    for whole, _ in found:
        assert_same_bits(whole, state)
    if all(shapes):  # a tensor without dimensions is whole on each rank
        assert sum(held for _, held in found) == sum(each.numel() for each in params.values())


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), limit=st.integers(1, 100))
def test_what_is_gathered_in_rounds_is_what_is_gathered_at_once(sizes, limit):
    """A large model is never on its way as a whole."""
    wholes = {f"w{place}": torch.arange(place, place + size) for place, size in enumerate(sizes)}
    shapes = {name: tuple(each.shape) for name, each in wholes.items()}

    def play(collectives):
        ranks = Sharded(collectives)
        rows = {name: each[slice(*ranks.box(shapes[name])[0])] for name, each in wholes.items()}
        rule = make_placement(make_mesh((2,)), [[0]])
        here = ranks.coordinates.data
        how = {"here": here, "rule": rule, "doing": "test", "round_bytes": limit}
        sums = sum_rows({name: each * (1 + collectives.rank) for name, each in wholes.items()}, collectives, **how)
        return gather_rows(rows, shapes, collectives, **how), gather_rows(sums, shapes, collectives, **how)

    for found, sums in run_threads(2, play):
        assert_same_bits(found, wholes)
        assert_same_bits(sums, {name: each * 3 for name, each in wholes.items()})


def linear(rows=5, fill=0.25):
    """The same on ranks that are threads, which share one global generator."""
    model = torch.nn.Linear(3, rows)
    for each in model.parameters():
        torch.nn.init.constant_(each, fill)
    return model


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def batch_of(ranks):
    """This rank's share."""
    return torch.full((2, 3), 1.0 + ranks.coordinates.data.rank)


def test_one_rank_cuts_nothing():
    """On one rank the state is the state, and the step is the step without ranks."""
    ranks, model = Sharded(SingleProcess()), linear()
    state = init_state(model, ADAMW)
    assert ranks.cut(state) is state
    assert ranks.whole(state) is state
    step = make_step(model, loss_fn, ADAMW, parallelism=ranks, clip_norm=0.1)
    assert_same_bits(
        step(state, batch_of(ranks))[0], make_step(model, loss_fn, ADAMW, clip_norm=0.1)(state, batch_of(ranks))[0]
    )


def test_a_batch_that_is_not_finite_is_skipped_and_the_state_of_parts_is_as_it_was():
    """A09: on every rank, also with donation; the step after it has the bits of a run that never saw the batch."""

    def play(collectives):
        ranks, model = Sharded(collectives), linear()
        step = make_step(model, loss_fn, ADAMW, parallelism=ranks, clip_norm=0.5, donate=True)
        clean, _ = step(step(ranks.cut(init_state(model, ADAMW)), batch_of(ranks))[0], batch_of(ranks))
        state, _ = step(ranks.cut(init_state(model, ADAMW)), batch_of(ranks))
        with pytest.raises(NonFinite, match=r"not finite on ranks \[1\]") as caught:
            step(state, batch_of(ranks) * (math.inf if collectives.rank == 1 else 1.0))
        after, _ = step(caught.value.skipped, batch_of(ranks))
        return ranks.whole(after), ranks.whole(clean)

    for after, clean in run_threads(2, play):
        assert_same_bits((after.model, after.optimizer), (clean.model, clean.optimizer))
        assert after.trainer.samples == clean.trainer.samples + 4


def test_donation_writes_into_the_parts_and_without_it_they_do_not_change():
    """P01: the old state is consumed, its rows are the new ones' memory."""

    def play(collectives):
        ranks, model = Sharded(collectives), linear()
        state = ranks.cut(init_state(model, ADAMW))
        before = ranks.whole(state)
        make_step(model, loss_fn, ADAMW, parallelism=ranks)(state, batch_of(ranks))
        assert_same_bits(ranks.whole(state), before)
        place = state.model.params["weight"].tensor.data_ptr()
        after, _ = make_step(model, loss_fn, ADAMW, parallelism=ranks, donate=True)(state, batch_of(ranks))
        assert after.model.params["weight"].tensor.data_ptr() == place
        with pytest.raises(StateDonated):
            state.model.params["weight"]
        kept = [leaf for leaf in tree.leaves(after.optimizer.slots) if isinstance(leaf, Shard)]
        return len(kept), {leaf.placement is not None for leaf in kept}

    assert run_threads(2, play) == [(4, {True})] * 2  # two moments of two parameters


def test_a_parameter_without_dimensions_is_whole_on_each_rank_and_counts_once_in_the_norm():
    """A09: fully_shard refuses such a parameter."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = linear(), torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.inner(x) * self.scale

    def play(collectives, how):
        ranks, model = how(collectives), Scaled()
        state = init_state(model, ADAMW)
        state = ranks.cut(state) if how is Sharded else state
        state, metrics = make_step(model, loss_fn, ADAMW, parallelism=ranks)(state, batch_of(ranks))
        return (ranks.whole(state) if how is Sharded else state), metrics["grad_norm"]

    cut, whole = (run_threads(3, lambda ranks, how=how: play(ranks, how)) for how in (Sharded, Replicas))
    for (mine, norm), (theirs, wanted) in zip(cut, whole, strict=True):
        assert_same_bits(mine, theirs)
        assert math.isclose(norm, wanted, rel_tol=1e-6)


# --- what does not fit --------------------------------------------------------------------------------------------------


def refused(world, error, match, play):
    """What every rank must do so that the error is raised."""
    with pytest.raises(error, match=match):
        run_threads(world, lambda collectives: play(collectives, Sharded(collectives), linear()))


def stepped(ranks, model, state, *, how=None):
    return make_step(model, loss_fn, ADAMW, parallelism=ranks if how is None else how)(state, batch_of(ranks))


def test_a_state_that_was_not_cut_is_refused_with_the_call_that_cuts_it():
    """What is easily forgotten: `cut`, `parallelism=`, and that other functions take whole tensors."""
    refused(
        2,
        InvalidState,
        r"\['weight'\]: expected \[0:3, 0:3\] of \[5, 3\].* the whole tensor.*ranks\.cut\(init_state",
        lambda _, ranks, model: stepped(ranks, model, init_state(model, ADAMW)),
    )
    refused(
        2,
        InvalidState,
        r"found a part of one.*pass parallelism=trainfold\.ranks\.Sharded",
        lambda each, ranks, model: stepped(ranks, model, ranks.cut(init_state(model, ADAMW)), how=Replicas(each)),
    )
    refused(
        2,
        InvalidState,
        r"found a part of one.*ranks\.whole\(state\)",
        lambda _, ranks, model: bind_model(model, ranks.cut(init_state(model, ADAMW))),
    )
    refused(
        2,
        InvalidState,
        "is a state of parts already",
        lambda _, ranks, model: ranks.cut(ranks.cut(init_state(model, ADAMW))),
    )


def test_parts_of_other_ranks_and_other_cuts_are_refused_with_the_next_move():
    """A04: a state of four ranks on two is loaded from its checkpoint; parts of columns belong to an attached loop."""
    of_four = run_threads(4, lambda collectives: Sharded(collectives).cut(init_state(linear(), ADAMW)))
    refused(
        2,
        InvalidState,
        r"found \[0:2, 0:3\] of \[5, 3\]; .*load it with such a state as like=",
        lambda each, ranks, model: stepped(ranks, model, of_four[each.rank]),
    )

    def columns(_, ranks, model):
        state = ranks.cut(init_state(model, ADAMW))
        cut = {**state.model.params, "weight": make_shard(torch.zeros(5, 1), shape=(5, 3), starts=(0, 1))}
        return stepped(ranks, model, state.evolve(model=ModelState(Leaves(cut), Leaves())))

    refused(2, InvalidState, r"found \[0:5, 1:2\] of \[5, 3\]; train it with trainfold\.attach", columns)


def test_a_slot_that_is_whole_beside_a_part_is_refused():
    def play(_, ranks, model):
        state, _ = stepped(ranks, model, ranks.cut(init_state(model, ADAMW)))
        slots = {**state.optimizer.slots, "weight": {**state.optimizer.slots["weight"], "exp_avg": torch.zeros(5, 3)}}
        return stepped(
            ranks,
            model,
            state.evolve(optimizer=OptimizerState(state.optimizer.kind, Leaves(slots), state.optimizer.groups)),
        )

    refused(2, InvalidState, r"slots\['weight'\]\['exp_avg'\]: expected \[0:3, 0:3\] of \[5, 3\]", play)


def test_ranks_that_disagree_are_named_before_they_compute():
    """Ranks whose models were made with other seeds would each keep rows of another model, and no save could see it."""
    refused(
        2,
        RanksDisagree,
        r"state\.model\.params\['weight'\].*rank 1.*torch\.manual_seed",
        lambda each, ranks, _: ranks.cut(init_state(linear(fill=each.rank), ADAMW)),
    )

    def another_step(each, ranks, model):
        state = ranks.cut(init_state(model, ADAMW))
        return stepped(ranks, model, state.evolve(trainer=Progress(step=each.rank)))

    refused(2, RanksDisagree, r"rank 1 calls exchange\(gather the parameters of step 1, 2 tensors", another_step)


@pytest.mark.parametrize(
    ("opt", "found"),
    [
        (optimizer(torch.optim.Muon, lr=0.0), "whose step of some rows depends on the others"),
        (optimizer(torch.optim.Adafactor), r"keeps a slot of \[1, 3\]"),
        (optimizer(torch.optim.SGD, lr=0.1, masters=True), "masters=True"),
        ((lambda _: {}, lambda *_: ({}, {})), "functions of your own"),
    ],
)
def test_an_optimizer_that_needs_all_rows_is_refused(opt, found):
    refused(2, InvalidArgument, found, lambda _, ranks, model: make_step(model, loss_fn, opt, parallelism=ranks))


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"]
)
def test_the_optimizers_of_torch_that_step_row_by_row_are_taken(name):
    check_by_rows(optimizer(getattr(torch.optim, name), foreach=True))


def test_ranks_that_cannot_exchange_parts_are_refused():
    class Few:
        rank, world_size = 0, 2

    with pytest.raises(InvalidArgument, match="a method exchange"):
        Sharded(Few())


def test_a_checkpoint_of_whole_states_is_loaded_as_parts_and_the_other_way_round():
    """A05: on other numbers of ranks; the two kinds of steps go on from either."""
    store, model = MemoryStore(), linear()

    def train_whole(collectives):
        ranks = Replicas(collectives)
        state, _ = make_step(model, loss_fn, ADAMW, parallelism=ranks)(init_state(model, ADAMW), batch_of(ranks))
        save(state, store, collectives=collectives)
        return state

    def train_parts(collectives):
        ranks = Sharded(collectives)
        state = load(store, like=ranks.cut(init_state(model, ADAMW)), collectives=collectives)
        before = ranks.whole(state)
        state, _ = make_step(model, loss_fn, ADAMW, parallelism=ranks)(state, batch_of(ranks))
        save(state, store, collectives=collectives)
        return before, ranks.whole(state)

    wanted = run_threads(2, train_whole)[0]
    found = run_threads(3, train_parts)
    alone = load(store, like=init_state(model, ADAMW))
    for before, after in found:
        assert_same_bits((before.model, before.optimizer), (wanted.model, wanted.optimizer))
        assert_same_bits((after.model, after.optimizer), (alone.model, alone.optimizer))


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_fails_in_any_exchange_stops_all_and_no_rank_has_updated(silent):
    """N03: every exchange of a step comes before its update; the ranks make the same calls."""
    model = linear()

    def play(collectives):
        ranks = Sharded(collectives)
        state = ranks.cut(init_state(model, ADAMW))
        start, before = len(collectives.schedule), [each.tensor.clone() for each in state.model.params.values()]
        step = make_step(model, loss_fn, ADAMW, parallelism=ranks, clip_norm=0.5, donate=True)
        try:
            step(state, batch_of(ranks))
        except (RankFailed, InjectedFailure):
            assert_same_bits([each.tensor for each in state.model.params.values()], before)
            raise
        return start

    whole = thread_outcomes(2, play)
    assert whole[0].schedule == whole[1].schedule
    calls = range(whole[0].value, len(whole[0].schedule))
    assert [whole[0].schedule[index].kind for index in calls] == ["exchange", "all_sum", "exchange", "all_sum"]
    for index in calls:
        ended = thread_outcomes(
            2, play, fail_at=RankFault(1, index, silent=silent), timeout_secs=0.3 if silent else 60.0
        )
        assert [type(each.error) for each in ended] == [RankFailed, InjectedFailure], index


def test_an_average_of_parts_is_saved_loaded_on_other_ranks_and_gathered():
    """A05: under ``extra``, also of a parameter without dimensions and on one rank; a part of other ranks is named."""
    store = MemoryStore()
    params = {"w": torch.arange(10.0).reshape(5, 2), "scale": torch.tensor(2.0)}
    state = TrainState(ModelState(Leaves(params), Leaves()), trainer=Progress(step=3))

    def averaged(ranks, factor):
        cut = ranks.cut(state)
        average = {
            name: ranks.part(ranks.local(leaf) * factor, tuple(leaf.shape)) for name, leaf in cut.model.params.items()
        }
        return cut.evolve(extra={"average": average})

    run_threads(2, lambda each: save(averaged(Sharded(each), 3.0), store, collectives=each))
    for size in (3, 1):
        found = run_threads(
            size, lambda each: Sharded(each).whole(load(store, like=averaged(Sharded(each), 0.0), collectives=each))
        )
        for each in found:
            assert_same_bits(each.extra["average"], {name: value * 3 for name, value in params.items()})
    of_three = run_threads(3, lambda each: averaged(Sharded(each), 1.0).extra)
    with pytest.raises(InvalidState, match=r"state\.extra\['average'\]\['w'\]: expected \[0:3, 0:2\]"):
        run_threads(2, lambda each: Sharded(each).whole(averaged(Sharded(each), 1.0).evolve(extra=of_three[each.rank])))

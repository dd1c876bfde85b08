"""The laws that users can call: trainfold's own parts keep them, and each law finds a part that breaks it."""

import random

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.backends.formats.native import plan_reader
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore, SimulatedCrash
from trainfold.core.data.cursor import make_cursor
from trainfold.core.data.permutation import sample_order
from trainfold.core.data.shares import shard_of
from trainfold.core.errors import ResumeRefused, SaveFailed
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.leaf_spec import diff_specs
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import laws, strategies
from trainfold.properties.laws import LawBroken


class Net(nn.Module):
    """Dropout, BatchNorm, tied weights and a frozen parameter: everything that a resume could lose."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(dropout)
        self.middle = nn.Linear(4, 4, bias=False)
        self.again = self.middle
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.drop(torch.relu(self.norm(self.first(x)))) * self.frozen
        return self.head(self.again(self.middle(hidden))).squeeze(-1)


def loss_fn(model, batch):
    error = model(batch["x"]) - batch["y"]
    return Loss(sum=(error * error).sum(), weight=len(batch["y"]))


def make(seed=0, *, dropout=0.3, cls=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = Net(dropout)
    optimizer = trainfold.optimizer(cls, lr=0.05)
    schedule = trainfold.schedules.cosine(20, warmup_steps=3)
    state = trainfold.init_state(model, optimizer, seed=seed, schedule=schedule, dataset=make_cursor(100, seed=seed))
    return trainfold.make_step(model, loss_fn, optimizer, schedule=schedule, **options), state


def some_batches(count, size=6):
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, generator=generator)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_run_that_dies_anywhere_ends_with_the_same_bits(donate, cls, tmp_path):
    """V13: k steps + save + load + n steps == k+n steps bitwise: dropout on, LR not constant, accumulation > 1, clipping."""
    step, state = make(cls=cls, donate=donate, accumulate=2, clip_norm=0.5)
    laws.resumes_exactly(step, state, some_batches(5))
    laws.resumes_exactly(step, state, some_batches(3), store=LocalStore(tmp_path / "run"))


def test_a_step_that_counts_on_hidden_state_does_not_resume():
    calls = []

    def forgetful(state, batch):
        calls.append(batch)
        return state.evolve(trainer=Progress(state.trainer.step + 1, samples=len(calls))), {}

    with pytest.raises(LawBroken, match=r"trainer\.samples"):
        laws.resumes_exactly(forgetful, TrainState(trainer=Progress()), [1, 2, 3])


def test_a_pure_step_is_pure_and_a_donating_one_equals_it():
    """Covers purity and donation, including BatchNorm statistics and the global random state."""
    step, state = make()
    donating, _ = make(donate=True)
    laws.is_pure(step, state, some_batches(1)[0])
    laws.donates_equally(step, donating, state, some_batches(4))


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_that_only_says_that_it_donates_is_found_out(donate):
    """So is a step that does donate but returns other bits."""
    step, state = make()
    donating, _ = make(donate=True)

    def other_bits(state, batch):
        after, metrics = donating(state, batch)
        after.model.params["head.bias"].add_(1e-3)
        return after, metrics

    broken, words = (
        (other_bits, r"head\.bias.*after step 1") if donate else (step, "input state of step 1 is still alive")
    )
    with pytest.raises(LawBroken, match=words):
        laws.donates_equally(step, broken, state, some_batches(2))


def test_a_donating_step_of_ones_own_need_not_have_leaves():
    def copies(state, batch):
        return state.evolve(extra={"total": state.extra["total"] + batch}), {}

    def writes(state, batch):
        return state.evolve(extra={"total": state.extra["total"].add_(batch)}), {}

    state = TrainState(extra={"total": torch.zeros(3)})
    laws.donates_equally(copies, writes, state, [1.0, 2.0])
    with pytest.raises(LawBroken, match="still alive"):
        laws.donates_equally(copies, copies, state, [1.0])


def test_an_impure_step_is_found_out():
    def writes(state, batch):
        state.model.params["head.bias"].add_(1)
        return state, {}

    def draws(state, batch):
        torch.rand(1)
        return state, {}

    def draws_numpy(state, batch):
        np.random.rand()  # noqa: NPY002
        return state, {}

    def draws_python(state, batch):
        random.random()
        return state, {}

    def wanders(state, batch, seen=[]):  # noqa: B006 - the hidden state is the point
        seen.append(1)
        return state.evolve(trainer=Progress(len(seen))), {}

    _, state = make()
    broken = {
        "head.bias": writes,
        "torch.random": draws,
        "numpy.random": draws_numpy,
        "purity: random": draws_python,
        "trainer.step": wanders,
    }
    for leaf, step in broken.items():
        with pytest.raises(LawBroken, match=leaf):
            laws.is_pure(step, state, some_batches(1)[0])


def test_pure_steps_equal_a_hand_written_loop():
    step, state = make(dropout=0.0, clip_norm=1.0)
    torch.manual_seed(0)
    model = Net(0.0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, trainfold.schedules.cosine(20, warmup_steps=3))

    def loop(batch):
        optimizer.zero_grad()
        ((model(batch["x"]) - batch["y"]) ** 2).sum().div(len(batch["y"])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return model if batch["x"].sum() > 0 else dict(model.named_parameters())

    laws.equals_mutable(step, state, loop, some_batches(6))
    with pytest.raises(LawBroken, match=r"model\.params"):
        laws.equals_mutable(step, state, loop, some_batches(1))


def test_a_loop_that_returns_less_or_other_buffers_is_found_out():
    step, state = make(dropout=0.0)
    batch = some_batches(1)[0]
    after, _ = step(laws.clone(state), batch)
    whole = {**after.model.params, **after.model.buffers}
    tied = {**whole, **{alias: whole[name] for alias, name in after.model.ties}}
    for returned in (whole, tied, dict(after.model.params)):
        laws.equals_mutable(step, state, lambda _, returned=returned: returned, [batch])
    less = {name: value for name, value in whole.items() if name != "head.bias"}
    moved = {**whole, "norm.running_mean": whole["norm.running_mean"] + 1}
    for returned, words in (
        ({}, r"model\.params\['frozen'\]: the loop did not return it"),
        (less, r"model\.params\['head\.bias'\]: the loop did not return it"),
        (moved, r"model\.buffers\['norm\.running_mean'\]: element 0"),
        ({**whole, "other": torch.ones(1)}, "other.*the state has none"),
        ({**whole, "head.bias": whole["head.bias"].double()}, r"head\.bias.*float32.*against.*float64"),
    ):
        with pytest.raises(LawBroken, match=words):
            laws.equals_mutable(step, state, lambda _, returned=returned: returned, [batch])


@settings(deadline=None, max_examples=20)
@given(batch=strategies.batches(max_samples=8).filter(lambda batch: len(batch["y"]) > 1))
def test_any_split_of_a_batch_gives_the_same_parameters(batch):
    """A01: N accumulated microbatches give the same parameters, optimizer and counters as one batch, to float tolerance, for any split."""
    count = len(batch["y"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    sgd = trainfold.optimizer(torch.optim.SGD, lr=0.01)
    steps = [trainfold.make_step(model, loss_fn, sgd, accumulate=k) for k in range(1, count + 1)]
    laws.accumulates(steps, trainfold.init_state(model, sgd), batch, rtol=1e-4, atol=1e-5)


def test_a_mean_of_means_is_found_out():
    def mean_of_means(state, batch):
        w = state.model.params["weight"].clone().requires_grad_()
        parts = [((batch["x"][i] @ w.T - batch["y"][i]) ** 2).mean() for i in (slice(0, 1), slice(1, 4))]
        (gradient,) = torch.autograd.grad(sum(parts) / 2, w)
        return state.evolve(
            model=attrs.evolve(state.model, params=trainfold.Leaves({"weight": w.detach() - gradient}))
        ), {}

    model = nn.Linear(3, 1, bias=False)
    sgd = trainfold.optimizer(torch.optim.SGD, lr=1.0)
    honest = trainfold.make_step(nn.Sequential(model, nn.Flatten(0)), loss_fn, sgd)
    state = trainfold.init_state(model, sgd)

    other = trainfold.make_step(model, lambda m, b: loss_fn(lambda x: m(x).squeeze(-1), b), sgd)
    assert honest is not other
    with pytest.raises(LawBroken, match=r"accumulation: model\.params\['weight'\].*split 1"):
        laws.accumulates([other, mean_of_means], state, some_batches(1, size=4)[0], rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    plan=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 16)), min_size=1, max_size=5),
)
def test_an_epoch_reads_each_sample_once_however_the_world_changes(length, seed, plan):
    laws.reads_each_sample_once(make_cursor(length, seed=seed), plan)


@settings(deadline=None, max_examples=12)
@given(
    length=st.integers(2, 40),
    seed=st.integers(0, 2**64 - 1),
    first=st.tuples(st.integers(1, 3), st.integers(1, 7)),
    then=st.tuples(st.integers(1, 3), st.integers(1, 7)),
    data=st.data(),
)
def test_a_saved_position_goes_on_with_the_next_sample_in_another_world(length, seed, first, then, data):
    """G01: the run may stop anywhere, also inside an epoch, and resume on another number of ranks."""

    def read(state, count, size, collectives):
        mine = []
        for _ in range(count):
            ids = state.dataset.batch_across(size)
            mine.append([int(index) for index in shard_of(ids, collectives.rank, collectives.world_size)])
            state = state.evolve(dataset=state.dataset.advance(size))
        return state, mine

    def whole(of_ranks):
        return [index for batch in zip(*of_ranks, strict=True) for share in batch for index in share]

    def start(collectives):
        state, mine = read(fresh, before, first[1], collectives)
        trainfold.save(state.evolve(trainer=Progress(before)), store, collectives=collectives)
        return mine

    def resume(collectives):
        return read(trainfold.load(store, like=fresh, collectives=collectives), after, then[1], collectives)[1]

    store, fresh = MemoryStore(), TrainState(trainer=Progress(), dataset=make_cursor(length, seed=seed))
    before, after = data.draw(st.integers(0, 2 * length // first[1])), -(-length // then[1])
    seen = [*whole(run_threads(first[0], start)), *whole(run_threads(then[0], resume))]
    epochs = -(-len(seen) // length)
    wanted = [int(index) for epoch in range(epochs) for index in sample_order(seed, epoch, length)[:]]
    assert seen == wanted[: len(seen)]
    assert len(seen) == before * first[1] + after * then[1]


def test_a_cursor_that_starts_over_is_found_out():
    class Restarting:
        def __init__(self, turns=0):
            self.epoch, self.length, self.turns = int(turns > 1), 6, turns

        def batch(self, size):
            return range(3)

        def advance(self, count):
            return Restarting(self.turns + 1)

    with pytest.raises(LawBroken, match="sample 0: read 2 times"):
        laws.reads_each_sample_once(Restarting(), [(1, 3)])


@settings(deadline=None, max_examples=2)
@given(strategies.states(step=st.just(4)), strategies.states(step=st.just(9)))
def test_every_crash_is_survived_whatever_the_states_are(one, two):
    """C02: the process is killed at any point: after every prefix of the effects, synced or not, torn or not."""
    assert laws.survives_crashes([two.evolve(trainer=one.trainer), two]) > 20


def test_a_store_that_shows_a_manifest_too_early_is_found_out(monkeypatch):
    honest = MemoryStore.after_crash

    def manifest_first(self, length, **kwargs):
        disk = honest(self, length, **kwargs)
        for name in disk.list(""):
            if name.startswith("step-") and "manifest.json" in disk.list(name):
                for file in disk.list(name):
                    if file != "manifest.json":
                        disk.delete(f"{name}/{file}")
        return disk

    monkeypatch.setattr(MemoryStore, "after_crash", manifest_first)
    _, state = make()
    with pytest.raises(LawBroken, match="crash"):
        laws.survives_crashes([state])


@settings(deadline=None, max_examples=60)
@given(fault=strategies.faults(effects=60))
def test_after_any_fault_what_was_acknowledged_is_found(fault):
    """C02, C15: faults are a crash, a full disk or a failing disk, at any effect, once or permanently."""
    store = MemoryStore(fault=fault)
    states = [
        TrainState(trainer=Progress(step), extra={"ema": {"w": torch.full((9,), float(step))}}) for step in (1, 2, 3)
    ]
    acknowledged = []
    for state in states:
        try:
            trainfold.save(state, store)
            acknowledged.append(state)
        except (SaveFailed, SimulatedCrash):
            pass
    disk = store.after_crash(len(store.effects))
    try:
        with pytest.MonkeyPatch.context():
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointPassedOver)
                found = trainfold.load(disk, like=states[0])
    except ResumeRefused:
        assert not acknowledged
    else:
        assert found.trainer.step >= max((state.trainer.step for state in acknowledged), default=0)
        assert fingerprint(found) == fingerprint(states[found.trainer.step - 1])


@given(strategies.specs(), strategies.specs())
def test_the_difference_of_specs_is_empty_only_for_equal_ones(saved, wanted):
    """V10: one list has the missing and unexpected leaves and those with another shape or dtype."""
    found = diff_specs(saved, wanted)
    assert (not found) == (saved == wanted)
    assert {each.path for each in found} == {p for p in {*saved, *wanted} if saved.get(p) != wanted.get(p)}


def test_a_lossy_store_is_found_out():
    class Lossy(MemoryStore):
        def read(self, name, *, start=0, stop=None):
            data = super().read(name, start=start, stop=stop)
            return data.replace(b'"samples":5', b'"samples":6')

    with pytest.raises(ResumeRefused):
        laws.round_trips(TrainState(trainer=Progress(1, samples=5)), store=Lossy)


def test_a_load_that_loses_a_bit_after_its_digest_was_checked_is_found_out(monkeypatch):
    """The digest has passed by then, so only the law can see it."""
    honest = plan_reader.read_tensors

    def careless(store, requests):
        tensors = honest(store, requests)
        for tensor in tensors:
            if tensor.numel():
                tensor.view(-1).view(torch.uint8)[0] ^= 1
        return tensors

    state = TrainState(trainer=Progress(1), extra={"ema": {"w": torch.zeros(5_000)}})
    laws.round_trips(state)
    monkeypatch.setattr(plan_reader, "read_tensors", careless)
    with pytest.raises(LawBroken, match=r"round trip: ema\['w'\]: element 0 is 0\.0 against 1\.4"):
        laws.round_trips(state)


def test_a_selection_that_is_no_partition_is_found_out(monkeypatch):
    """B01: a selection splits the components without overlap or loss."""
    _, state = make()
    laws.selects(state, ["model", "rng"])
    with monkeypatch.context() as patch:
        patch.setattr(laws, "merge", lambda one, other: one)
        with pytest.raises(LawBroken, match=r"selection: .*only one of the two has it; merging"):
            laws.selects(state, ["model"])
    with monkeypatch.context() as patch:
        patch.setattr(laws, "select", lambda state, names: state)
        with pytest.raises(LawBroken, match="is in both parts"):
            laws.selects(state, ["model"])


def traces(model, state):
    """Side effects of a careless save, and where each one shows."""
    return {
        "torch.random": lambda: torch.rand(1),
        "numpy.random": np.random.rand,
        "side-effect freedom: random": random.random,
        r"ema\['w'\]": lambda: state.extra["ema"]["w"].add_(1),
        r"params\['head\.bias'\]: element 0": lambda: model.head.bias.data.add_(1),
        r"params\['first\.weight'\]\.grad: a tensor against None": model.zero_grad,
        r"params\['first\.bias'\]\.grad: element": lambda: model.first.bias.grad.add_(1),
        r"params\['frozen'\]\.requires_grad: False against True": lambda: model.frozen.requires_grad_(True),
        r"buffers\['norm\.running_mean'\]": lambda: model.norm.running_mean.add_(1),
        r"modules\['drop'\]\.training: True against False": model.drop.eval,
    }


@pytest.mark.parametrize("trace", list(traces(Net(), None)))
@pytest.mark.parametrize("by", ["save", "load"])
def test_a_save_that_leaves_a_trace_is_found_out(trace, by, monkeypatch):
    """C14: traces are changed parameters, buffers, gradients, modes and random states."""
    torch.manual_seed(0)
    model, honest = Net(), getattr(laws, by)
    model(torch.randn(5, 3)).sum().backward()
    state = TrainState(trainer=Progress(1), extra={"ema": {"w": torch.zeros(3)}})
    careless = traces(model, state)[trace]

    def broken(*args, **kwargs):
        careless()
        return honest(*args, **kwargs)

    laws.leaves_no_trace(state, model=model)
    monkeypatch.setattr(laws, by, broken)
    with pytest.raises(LawBroken, match=trace):
        laws.leaves_no_trace(state, model=model)


def test_saving_a_live_run_leaves_no_trace_in_its_objects():
    """C14: this includes the capture."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    live = trainfold.attach(model, optimizer)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    live.advance(samples=5)
    laws.leaves_no_trace(live.capture, model=model)

    def careless():
        model.eval()
        return live.capture()

    with pytest.raises(LawBroken, match="training"):
        laws.leaves_no_trace(careless, model=model)

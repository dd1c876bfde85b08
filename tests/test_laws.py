"""The laws that users can call: they hold for trainfold's own parts, and each one finds a part that breaks it."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.backends.local import LocalStore
from trainfold.backends.memory import MemoryStore, SimulatedCrash
from trainfold.backends.runs import CheckpointPassedOver
from trainfold.core.cursor import make_cursor
from trainfold.core.errors import ResumeRefused, SaveFailed
from trainfold.core.fingerprint import fingerprint
from trainfold.core.spec import diff_specs
from trainfold.core.state import Progress, TrainState
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
    schedule = trainfold.cosine(20, warmup_steps=3)
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
    """Purity and donation, BatchNorm statistics and the global random state included."""
    step, state = make()
    donating, _ = make(donate=True)
    laws.is_pure(step, state, some_batches(1)[0])
    laws.donates_equally(step, donating, state, some_batches(4))


def test_an_impure_step_is_found_out():
    def writes(state, batch):
        state.model.params["head.bias"].add_(1)
        return state, {}

    def draws(state, batch):
        torch.rand(1)
        return state, {}

    def wanders(state, batch, seen=[]):  # noqa: B006 - the hidden state is the point
        seen.append(1)
        return state.evolve(trainer=Progress(len(seen))), {}

    _, state = make()
    for step, leaf in ((writes, "head.bias"), (draws, "torch.random"), (wanders, "trainer.step")):
        with pytest.raises(LawBroken, match=leaf):
            laws.is_pure(step, state, some_batches(1)[0])


def test_pure_steps_equal_a_hand_written_loop():
    step, state = make(dropout=0.0, clip_norm=1.0)
    torch.manual_seed(0)
    model = Net(0.0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, trainfold.cosine(20, warmup_steps=3))

    def loop(batch):
        optimizer.zero_grad()
        ((model(batch["x"]) - batch["y"]) ** 2).sum().div(len(batch["y"])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return dict(model.named_parameters())

    laws.equals_mutable(step, state, loop, some_batches(6))
    with pytest.raises(LawBroken, match=r"model\.params"):
        laws.equals_mutable(step, state, loop, some_batches(1))


@settings(deadline=None, max_examples=20)
@given(batch=strategies.batches(max_samples=8))
def test_any_split_of_a_batch_gives_the_same_parameters(batch):
    """A01: N microbatches accumulated give the parameters of one batch, to float tolerance, for any split."""
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
    with pytest.raises(LawBroken, match="accumulation"):
        laws.accumulates([other, mean_of_means], state, some_batches(1, size=4)[0], rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    plan=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 16)), min_size=1, max_size=5),
)
def test_an_epoch_reads_each_sample_once_however_the_world_changes(length, seed, plan):
    """G01: after resume the next sample is the one that would have come next, whatever the world size."""
    laws.reads_each_sample_once(make_cursor(length, seed=seed), plan)


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


@settings(deadline=None, max_examples=4)
@given(strategies.states(step=st.just(4)), strategies.states(step=st.just(9)))
def test_every_crash_is_survived_whatever_the_states_are(one, two):
    """C02: kill at any point; every prefix of the effects, synced or not, torn or not."""
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
    """C02, C15: a crash, a full disk, a failing one, at any effect, for a moment or for good."""
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
    """V10: missing, unexpected, shape and dtype are all in one list."""
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

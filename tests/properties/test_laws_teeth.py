"""Teeth of the laws: what hides its state outside the state, or forgets a part of it, is found out by the law that forbids it."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.core.errors import InvalidArgument
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import laws, resume_law
from trainfold.properties.laws import LawBroken
from trainfold.properties.resume_law import ResumeTask, resume_in_child


def loss_fn(model, batch):
    return Loss(sum=model(batch).square().sum(), weight=len(batch))


def make(cls=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model, optimizer = nn.Linear(3, 1), trainfold.optimizer(cls, lr=0.1)
    state = trainfold.init_state(model, optimizer)
    state = state.evolve(extra={"ema": state.model.params["weight"].clone()})
    return trainfold.make_step(model, loss_fn, optimizer, **options), state


def some_batches(count=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


class Hiding:
    """A step with hidden state that restarts at step 0: in one process, with steps in order, it is always right."""

    def __init__(self):
        self.step, _ = make()
        self.hidden = None

    def __call__(self, state, batch):
        if state.trainer.step == 0:
            self.hidden = None
        return self.work(state, batch)


class HidesMomentum(Hiding):
    def work(self, state, batch):
        self.hidden = 0.9 * (self.hidden or 0.0) + float(batch.sum())
        return self.step(state, batch * (1 + self.hidden))


class HidesCounter(Hiding):
    """Behaves like a torch scheduler that is not saved."""

    def work(self, state, batch):
        self.hidden = (self.hidden or 0) + 1
        return self.step(state, batch / self.hidden)


class HidesParity(Hiding):
    def work(self, state, batch):
        self.hidden = not self.hidden
        return self.step(state, batch if self.hidden else -2 * batch)


class HidesAverage(Hiding):
    """Writes its average into the state, but never reads it from there."""

    def work(self, state, batch):
        after, metrics = self.step(state, batch)
        weight = after.model.params["weight"]
        self.hidden = weight.clone() if self.hidden is None else 0.9 * self.hidden + 0.1 * weight
        return after.evolve(extra={"ema": self.hidden.clone()}), metrics


class HidesLastBatch(Hiding):
    def work(self, state, batch):
        last, self.hidden = (batch if self.hidden is None else self.hidden), batch
        return self.step(state, batch + last)


class HidesFirstWeights(Hiding):
    def work(self, state, batch):
        self.hidden = state.model.params["weight"].clone() if self.hidden is None else self.hidden
        return self.step(state, batch + self.hidden)


class HidesByStep(Hiding):
    """Each step leaves a value for the next one, under that step's number."""

    def __init__(self):
        super().__init__()
        self.left = {}

    def work(self, state, batch):
        now = state.trainer.step
        found = self.left.get(now, 0.0) if now else 0.0
        self.left[now + 1] = found + float(batch.mean())
        return self.step(state, batch + found)


class HidesUntilItJumps(Hiding):
    """Notices that a state is not the expected next one, and then restarts."""

    def __init__(self):
        super().__init__()
        self.next = 0

    def work(self, state, batch):
        if state.trainer.step != self.next:
            self.hidden = None
        self.next = state.trainer.step + 1
        self.hidden = 0.5 * (self.hidden or 0.0) + float(batch.sum())
        return self.step(state, batch * (1 + self.hidden))


HIDING = [
    HidesMomentum, HidesCounter, HidesParity, HidesAverage, HidesLastBatch, HidesFirstWeights, HidesByStep, HidesUntilItJumps
]  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("hiding", HIDING)
def test_a_step_that_begins_anew_at_step_0_does_not_hide_what_it_keeps(hiding, count):
    """V13: the process that resumes has not run the steps before."""
    _, state = make()
    with pytest.raises(LawBroken, match=r"resume: .*died after \d of"):
        laws.resumes_exactly(hiding(), state, some_batches(count))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("hiding", HIDING)
def test_one_death_is_enough_to_find_what_a_step_keeps(hiding, k):
    _, state = make()
    with pytest.raises(LawBroken, match=f"resume: .*died after {k} of 4"):
        laws.resumes_exactly(hiding(), state, some_batches(4), at=[k])


class KeepsFirst:
    """A step that keeps the first value it saw and never changes it: in one process it is always the same."""

    def __init__(self):
        self.step, _ = make()
        self.first = None

    def __call__(self, state, batch):
        self.first = batch.mean() if self.first is None else self.first
        return self.step(state, batch - self.first)


FIRST = []  # of this process


def keep_first_in_a_global():
    step, _ = make()

    def keeps(state, batch):
        FIRST.append(batch.mean())
        return step(state, batch - FIRST[0])

    return keeps


def make_honest():
    return make()[0]


NAMELESS = lambda: make()[0]  # what pickle cannot find by its name


def test_a_step_that_keeps_what_it_saw_first_is_found_by_making_it_anew():
    """The only one of 19 bugs planted in users' steps that was missed: a step that is made once has already seen the value."""
    _, state = make()
    laws.resumes_exactly(
        KeepsFirst(), state, some_batches()
    )  # this is why the law takes a function that makes the step
    laws.resumes_exactly(laws.made_by(KeepsFirst), state, some_batches(), at=[0])
    for k in (1, 2, 3):
        with pytest.raises(LawBroken, match=f"resume: .*died after {k} of 4"):
            laws.resumes_exactly(laws.made_by(KeepsFirst), state, some_batches(), at=[k])


@pytest.mark.parametrize("hiding", HIDING)
def test_what_a_step_hides_is_found_by_a_maker_too(hiding):
    _, state = make()
    with pytest.raises(LawBroken, match=r"resume: .*died after \d of"):
        laws.resumes_exactly(laws.made_by(hiding), state, some_batches())


def test_a_new_process_finds_what_a_module_keeps_in_its_globals():
    _, state = make()
    FIRST.clear()
    laws.resumes_exactly(laws.made_by(keep_first_in_a_global), state, some_batches(), at=[2])
    with pytest.raises(LawBroken, match=r"resume: .*died after 2 of 4 steps, and resumed in a new process"):
        laws.resumes_exactly(laws.made_by(keep_first_in_a_global, in_new_process=True), state, some_batches(), at=[2])


@pytest.mark.long
def test_an_honest_step_resumes_in_a_new_process():
    _, state = make()
    laws.resumes_exactly(laws.made_by(make_honest, in_new_process=True), state, some_batches(), at=[1])


def test_a_maker_that_a_new_process_cannot_import_is_refused_with_the_next_move():
    _, state = make()
    with pytest.raises(InvalidArgument, match=r"made_by\.make: .*top of a module"):
        laws.resumes_exactly(laws.made_by(lambda: make()[0], in_new_process=True), state, some_batches(), at=[1])
    with pytest.raises(InvalidArgument, match=r"made_by\.make: .*top of a module"):
        laws.resumes_exactly(laws.made_by(NAMELESS, in_new_process=True), state, some_batches(), at=[1])
    with pytest.raises(InvalidArgument, match=r"made_by\.make"):
        laws.made_by(make()[1])


@pytest.mark.parametrize(
    ("batches", "at", "named"),
    [
        (some_batches(4), [], "at: .*found none"),
        (some_batches(4), [5], r"at: expected one or more numbers of steps in \[0, 4\]"),
        (some_batches(4), [-1], "at"),
        (iter(some_batches(4)), None, r"batches: expected a list.*pass list\(batches\)"),
    ],
)
def test_a_resume_of_which_no_death_is_looked_at_is_no_proof(batches, at, named):
    """It used to pass, but a law without a single case is a test that cannot fail."""
    step, state = make()
    with pytest.raises(InvalidArgument, match=rf"resumes_exactly\.{named}"):
        laws.resumes_exactly(step, state, batches, at=at)


def test_what_the_new_process_raises_is_what_it_says(tmp_path):
    """Runs in this process, because starting one is expensive."""
    _, state = make()
    said = []

    def fails():
        raise OSError("no such tokenizer")

    laws.save(state, tmp_path / "run")
    resume_in_child(ResumeTask(fails, tmp_path, state, [], torch.get_num_threads()), SimpleNamespace(send=said.append))
    assert said[0].startswith("OSError: no such tokenizer")


@pytest.mark.parametrize(
    ("hiding", "at_step"),
    [
        *(
            (hiding, at_step)
            for hiding in (HidesMomentum, HidesCounter, HidesParity, HidesAverage)
            for at_step in (0, 1)
        ),
        (HidesFirstWeights, 0),
    ],
)
def test_a_step_that_hides_something_is_not_pure(hiding, at_step):
    step, state = make()
    batch = some_batches(1)[0]
    for _ in range(at_step):
        state, _ = step(state, batch)
    with pytest.raises(LawBroken, match=r"purity: .*the second time"):
        laws.is_pure(hiding(), state, batch)


@pytest.mark.parametrize("donate", [False, True])
def test_the_detour_that_finds_hidden_state_costs_an_honest_step_nothing(donate):
    """The law keeps the order and the number of batches; a run of one batch, or of none, is a run too."""
    step, state = make(donate=donate, schedule=trainfold.schedules.cosine(4))
    for count in (0, 1, 2, 4):
        laws.resumes_exactly(step, state, some_batches(count))
    calls = []

    def counted(state, batch):
        calls.append(batch)
        return step(state, batch)

    laws.resumes_exactly(counted, state, some_batches(4), at=[2, 4])
    assert len(calls) == 4 + (2 + 4 + 2) + 4


def test_a_load_that_bends_what_the_next_step_overwrites_is_found_out(monkeypatch):
    """The loaded state itself is compared, not only the steps after it."""
    honest = resume_law.load

    def bends(*args, **kwargs):
        return honest(*args, **kwargs).evolve(extra={"last": -1})

    def step(state, batch):
        return state.evolve(trainer=Progress(state.trainer.step + 1), extra={"last": batch}), {}

    state = TrainState(trainer=Progress(), extra={"last": 0})
    laws.resumes_exactly(step, state, [1, 2])
    monkeypatch.setattr(resume_law, "load", bends)
    with pytest.raises(LawBroken, match=r"last.*1 against -1; loaded after 1 steps"):
        laws.resumes_exactly(step, state, [1, 2], at=[1])


def forgets_optimizer(state, after):
    return after.evolve(optimizer=state.optimizer)


def forgets_slots(state, after):
    return after.evolve(optimizer=attrs.evolve(after.optimizer, slots=trainfold.Leaves({})))


def miscounts_tokens(state, after):
    return after.evolve(trainer=attrs.evolve(after.trainer, tokens=after.trainer.tokens + 1))


def loses_counters(state, after):
    return after.evolve(trainer=None)


def loses_model(state, after):
    return after.evolve(model=None)


def loses_parameter(state, after):
    params = trainfold.Leaves({"weight": after.model.params["weight"]})
    return after.evolve(model=attrs.evolve(after.model, params=params))


@pytest.mark.parametrize("tolerance", [0.0, 0.5])
@pytest.mark.parametrize("broken_first", [False, True])
@pytest.mark.parametrize(
    ("breaks", "leaf"),
    [
        (forgets_optimizer, r"optimizer\.slots.*"),
        (forgets_slots, r"optimizer\.slots.*only one of the two has it"),
        (miscounts_tokens, r"trainer\.tokens: .* against "),
        (loses_counters, r"trainer.*only one of the two has it"),
        (loses_model, r"model.*only one of the two has it"),
        (loses_parameter, r"model\.params\['bias'\]: only one of the two has it"),
    ],
)
def test_a_split_that_forgets_a_part_of_the_state_is_found_out(breaks, leaf, broken_first, tolerance):
    """A01: the optimizer and the counters are the same as without a split."""
    step, state = make()

    def broken(state, batch):
        after, metrics = step(laws.clone(state), batch)
        return breaks(state, after), metrics

    steps = [broken, step] if broken_first else [step, broken]
    laws.accumulates([step, step], state, some_batches(1)[0])
    with pytest.raises(LawBroken, match=f"accumulation: {leaf}.*split 1"):
        laws.accumulates(steps, state, some_batches(1)[0], atol=tolerance * 1e-3, rtol=tolerance)


def test_the_optimizer_and_the_parameters_have_the_same_tolerance():
    step, state = make()

    def rounds(state, batch):
        after, metrics = step(state, batch)
        slots = {
            name: {slot: value * (1 + 1e-5) if slot == "exp_avg" else value for slot, value in of.items()}
            for name, of in after.optimizer.slots.items()
        }
        return after.evolve(optimizer=attrs.evolve(after.optimizer, slots=trainfold.Leaves(slots))), metrics

    laws.accumulates([step, rounds], state, some_batches(1)[0], rtol=1e-4)
    for less in ({}, {"rtol": 1e-7}):
        with pytest.raises(LawBroken, match=r"optimizer\.slots.*exp_avg"):
            laws.accumulates([step, rounds], state, some_batches(1)[0], **less)


def test_a_comparison_of_one_split_or_of_no_model_is_refused():
    step, state = make()
    batch = some_batches(1)[0]
    for steps in ([], [step]):
        with pytest.raises(InvalidArgument, match=r"accumulates\.steps.*two"):
            laws.accumulates(steps, state, batch)
    with pytest.raises(InvalidArgument, match=r"accumulates\.state.*a model"):
        laws.accumulates([step, step], TrainState(trainer=Progress()), batch)

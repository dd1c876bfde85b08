"""The bodies of `live.epochs`: code before the first batch, code after a break, and saves in between."""

import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import DataPositionMismatch, IncompleteWindow, InvalidArgument, RestoreRefused

N = 12
pytestmark = [
    pytest.mark.slow(0.25),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),  # torch counts the steps of this process
]


class Noisy(Dataset):
    """Draws from the global streams."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([index + 1, random.random(), float(torch.rand(()))])


def loader(**arguments):
    return DataLoader(Noisy(), **{"batch_size": 3, "shuffle": True, **arguments})


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


class Died(Exception):
    pass


class Program:
    """A small training program; plain, attached, or resumed. `die` is where it ends: a step, or ("end", an epoch)."""

    def __init__(self, make=loader, *, seed=1, state=None, is_plain=False, die=None):
        seed_all(1)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.loaders, self.die, self.state, self.step, self.events = make(), die, None, 0, []
        self.ema = torch.nn.Linear(3, 1)
        self.live = None
        if not is_plain:
            self.live = attach(
                self.model, self.optimizer, scheduler=self.scheduler, loader=self.loaders, extra={"ema": self.ema}
            )
        seed_all(seed)
        if state is not None:
            self.live.restore(state)
            self.step = self.live.progress.step

    def epochs(self, n):
        return range(n) if self.live is None else self.live.epochs(n)

    def batches(self, *name):
        if self.live is not None:
            return self.live.batches(*name)
        return self.loaders[name[0]] if name else self.loaders

    def train(self, *batches, samples=None):
        loss = sum(self.model(batch).square().mean() for batch in batches)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        group = self.optimizer.param_groups[0]
        self.events.append([self.step, *(batch.tolist() for batch in batches), float(loss.detach()), group["lr"]])
        if self.live is not None:
            self.live.advance(samples=samples)
            self.dies(self.step)

    def dies(self, where):
        if self.live is not None and self.die == where:
            self.state = copied(self.live.capture())
            raise Died

    def ends(self, epoch):
        self.events.append([self.step, "end", epoch, random.random()])
        if self.live is not None:
            self.live.capture()  # as a save does at the end of each epoch
        self.dies(("end", epoch))


def killed(program, make, die):
    """The events of a program that dies, and of the one that goes on."""
    first = Program(make, die=die)
    with pytest.raises(Died):
        program(first)
    second = Program(make, seed=77, state=first.state)
    program(second)
    return first.events + second.events


def check(program, make=loader, dies=(1, 4, 5, 8, ("end", 0), ("end", 1))):
    """A plain loop, an attached one, and one that dies and is resumed have the same events."""
    plain = Program(make, is_plain=True)
    program(plain)
    whole = Program(make)
    program(whole)
    assert whole.events == plain.events, "attaching has changed something"
    for die in dies:
        assert killed(program, make, die) == whole.events, die


def seeds(run, epoch):
    seed_all(100 + epoch)


def samples(run, epoch):
    run.noise = torch.randn(3).tolist()


def decays(run, epoch):
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def schedules(run, epoch):
    if epoch:
        run.scheduler.step()


def perturbs(run, epoch):
    for parameter in run.model.parameters():
        parameter.data.mul_(0.9).add_(torch.randn_like(parameter), alpha=0.01)  # no version counter sees it


def forgets_momentum(run, epoch):
    run.optimizer.state.clear()


def averages(run, epoch):
    with torch.no_grad():
        for mine, theirs in zip(run.ema.parameters(), run.model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    run.events.append([run.step, run.ema.weight.tolist()])


STARTS = [seeds, samples, decays, schedules, perturbs, forgets_momentum]
NAMED = {decays: "lr", schedules: "scheduler", perturbs: "model", forgets_momentum: "optimizer"}


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_what_a_body_does_before_its_first_batch_is_done_once_for_each_epoch(start, caplog):
    """W04, G11: a resume inside an epoch puts it back and names it; at an epoch's start the loop's own changes stay."""

    def program(run):
        for epoch in run.epochs(3):
            start(run, epoch)
            for batch in run.batches():
                run.train(batch)
            run.ends(epoch)

    check(program, dies=[1, 5, 7])
    assert f"put back as it was saved: {'the random' if start in (seeds, samples) else ''}" in caplog.text
    assert NAMED.get(start, "the random streams of") in caplog.text
    caplog.clear()
    check(program, dies=[("end", 0), ("end", 1)])
    assert not caplog.text
    check(program, dies=[4, 8])  # the last batch of an epoch, whose body has its end still to do


def test_objects_under_extra_that_a_body_changes_at_its_start_are_put_back():
    """W04: this holds for every object that the run saves."""

    def program(run):
        for epoch in run.epochs(3):
            averages(run, epoch)
            for batch in run.batches():
                run.train(batch)

    plain = Program(is_plain=True)
    program(plain)
    for die in (2, 6):
        events = [each for each in killed(program, loader, die) if len(each) > 2]
        assert events == [each for each in plain.events if len(each) > 2]
        first = Program(die=die)
        with pytest.raises(Died):
            program(first)
        second = Program(seed=7, state=first.state, die=die + 1)
        with pytest.raises(Died):
            program(second)
        assert torch.equal(second.state.extra["ema"].params["weight"], first.state.extra["ema"].params["weight"])


def test_a_body_that_sets_the_same_values_again_is_not_spoken_of(caplog):
    """W04: an absolute value, or a cleared gradient, is right at each resume."""

    def program(run):
        for epoch in run.epochs(3):
            run.optimizer.param_groups[0]["lr"] = 0.1 * 0.5**epoch
            run.optimizer.zero_grad()
            run.model.train()
            for batch in run.batches():
                run.train(batch)

    check(program, dies=[2, 4, 6])
    assert not caplog.text


def test_a_param_group_that_a_body_adds_at_its_start_is_refused_where_it_was_not_there_at_the_save():
    """W04: it cannot be put back, so training does not start."""
    first = Program(die=2)

    def program(run):
        for _ in run.epochs(2):
            if run.state is None and run.step:
                run.optimizer.add_param_group({"params": list(run.ema.parameters())})
            for batch in run.batches():
                run.train(batch)

    with pytest.raises(Died):
        program(first)
    second = Program(state=first.state)
    with pytest.raises(RestoreRefused, match="optimizer"):
        program(second)
    assert not second.events


def test_a_dataset_that_is_built_late_is_put_back_and_the_seed_of_the_body_stays(caplog):
    """G11: with `live.epochs` the two can be distinguished."""

    def program(run):
        for epoch in run.epochs(3):
            seed_all(100 + epoch)
            for batch in run.batches():
                run.train(batch)
            run.ends(epoch)

    whole = Program(is_plain=True)
    program(whole)
    for die in (2, ("end", 0)):
        first = Program(die=die)
        with pytest.raises(Died):
            program(first)
        caplog.clear()
        second = Program(seed=5, state=first.state)
        torch.nn.Linear(4, 4), random.random()
        program(second)
        assert first.events + second.events == whole.events
        assert "random streams of python, torch have moved between the restore" in caplog.text


def range_program(run, *, seeds_each_epoch=True):
    """A loop over range(...), as it is written without `live.epochs`."""
    for epoch in range(0 if run.live is None else run.live.progress.epoch, 4):
        if seeds_each_epoch:
            torch.manual_seed(epoch)
        for batch in run.loaders if run.live is None else run.live.batches(epochs=epoch + 1):
            run.train(batch)
        run.ends(epoch)


def test_a_loop_over_a_range_that_seeds_each_epoch_goes_on_so_once_it_was_seen_to_and_says_what_it_does_not_know(
    caplog,
):
    """G11: the position records it. Before that, a seed cannot be distinguished from a dataset that is built late."""
    check(range_program, dies=[2, 5, 9])  # inside an epoch
    assert caplog.text.count("as it would have") == 3
    caplog.clear()
    check(range_program, dies=[("end", 1), ("end", 2)])
    assert caplog.text.count("are left so") == 2
    assert "live.epochs" in caplog.text
    caplog.clear()
    whole = Program(is_plain=True)
    range_program(whole)
    assert killed(range_program, loader, ("end", 0)) != whole.events
    assert "cannot be distinguished here: write `for epoch in live.epochs(n)" in caplog.text


def test_a_loop_over_a_range_that_leaves_the_streams_alone_gets_them_back(caplog):
    """G11: draws between the restore and the first batch did not come from the loop."""
    program = partial(range_program, seeds_each_epoch=False)
    whole = Program(is_plain=True)
    program(whole)
    first = Program(die=("end", 1))
    with pytest.raises(Died):
        program(first)
    assert "moves" not in first.state.dataset.value
    second = Program(state=first.state)
    torch.rand(3)
    program(second)
    assert first.events + second.events == whole.events
    assert "put back as they were saved" in caplog.text


def test_a_position_with_another_note_on_streams_is_refused():
    state = Program().live.capture()
    other = state.evolve(dataset=type(state.dataset)({**state.dataset.value, "moves": "yes"}))
    with pytest.raises(RestoreRefused, match=r"dataset\.moves"):
        Program(state=other)


def leaves(run):
    """Two batches an epoch."""
    for epoch in run.epochs(3):
        for number, batch in enumerate(run.batches()):
            run.train(batch)
            if number == 1:
                break
        run.ends(epoch)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}],
    ids=["0", "2", "persistent"],
)
def test_a_save_after_an_epoch_that_was_left_early_begins_the_next_one(arguments, caplog):
    """W04: as the plain loop does; batches that persistent workers had prefetched are drawn again."""
    check(leaves, partial(loader, **arguments), dies=[("end", 0), ("end", 1)])
    assert "counts epoch" in caplog.text  # the program has ended after such a save: it may have been stopped


def test_workers_that_live_on_need_the_data_probe_to_leave_an_epoch_at_a_resume():
    """W03, W04: without the probe they would start at another task, so the resume is refused."""
    make = partial(loader, num_workers=2, persistent_workers=True)
    first = Program(make, die=("end", 0))
    with pytest.raises(Died):
        leaves(first)
    second = Program(make)
    second.live.restore(first.state, policy={"data_probe": "adapt"})
    with pytest.raises(DataPositionMismatch, match="left this epoch early"):
        leaves(second)


def test_a_batch_that_a_break_throws_away_is_no_open_window():
    """A06, W04: the plain loop has drawn it too, and continues without it."""

    def program(run):
        for epoch in run.epochs(3):
            for number, batch in enumerate(run.batches()):
                if number == 2:
                    break
                run.train(batch)
            run.ends(epoch)

    check(program, dies=[("end", 0), ("end", 1)])


def test_a_batch_that_was_only_looked_at_is_an_open_window():
    """A06: the epoch has neither started nor been left."""
    live = Program().live
    for _ in live.epochs(1):
        next(iter(live.batches()))
        with pytest.raises(IncompleteWindow, match="handed out"):
            live.capture()
        live.drop_window()


def test_a_save_with_an_iterator_held_open_stays_in_the_epoch():
    """W04: a loop with `next` continues at its position."""

    def program(run):
        for epoch in run.epochs(2):
            batches = iter(run.batches())
            while (batch := next(batches, None)) is not None:
                run.train(batch)
                run.dies(("in", run.step))
            run.ends(epoch)

    check(program, dies=[1, 4, ("in", 3), ("in", 4), ("end", 0)])


def ahead(batches, depth=1):
    """Draws batches ahead of those that it gives."""
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.pop(0)
    yield from waiting


class Ahead:
    """Draws one ahead, and holds the iterator for as long as it lives."""

    def __init__(self, batches):
        self.batches = iter(batches)
        self.waiting = next(self.batches, None)

    def __iter__(self):
        while (batch := self.waiting) is not None:
            self.waiting = next(self.batches, None)
            yield batch


AROUND_AN_END = [2, 3, 4, 5, ("end", 0), ("end", 1)]  # 4 batches an epoch


@pytest.mark.parametrize("prefetcher", [ahead, partial(ahead, depth=2), Ahead], ids=["one", "two", "class"])
@pytest.mark.parametrize("size", [3, 100], ids=["many batches", "one batch"])
def test_a_prefetcher_in_the_body_is_resumed_at_every_step_and_does_the_end_of_each_epoch_once(
    prefetcher, size, caplog
):
    """W04: the iterator ends before the steps on the last batches, but these steps still belong to the epoch."""

    def program(run):
        for epoch in run.epochs(3):
            for batch in prefetcher(run.batches()):
                run.train(batch, samples=len(batch))
            run.scheduler.step()
            run.ends(epoch)

    dies = AROUND_AN_END if size == 3 else [1, 2, ("end", 0), ("end", 1)]
    check(program, partial(loader, batch_size=size), dies=dies)
    assert "a variable still holds" not in caplog.text


def test_a_prefetcher_that_a_variable_holds_is_told_what_a_save_after_the_loop_means(caplog):
    """W04: it cannot be known whether such a save is inside the loop or after it."""
    run = Program()
    for _ in run.live.epochs(3):
        batches = Ahead(run.live.batches())
        for batch in batches:
            run.train(batch, samples=len(batch))
            run.live.capture()
    assert caplog.text.count("a variable still holds the iterator") == 1


def test_a_loop_that_ends_by_steps_stays_in_the_epoch():
    """W04: `steps` ends part of an epoch, not the epoch."""
    run = Program()
    for _ in run.live.epochs(1):
        for batch in run.live.batches(steps=2):
            run.train(batch)
        state = copied(run.live.capture())
    live = Program(state=state).live
    assert sum(1 for _ in live.epochs(1) for _ in live.batches()) == 2


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=["shorter-first", "longer-first"])
def test_zipped_loaders_saved_after_the_loop_begin_the_next_epoch(sizes):
    """W04: the longer one is left early, and the batch that zip() discarded does not open a window."""

    def make():
        return {"a": loader(batch_size=sizes[0]), "b": loader(batch_size=sizes[1])}

    def program(run):
        for epoch in run.epochs(3):
            for pair in zip(run.batches("a"), run.batches("b"), strict=False):
                run.train(*pair)
            run.ends(epoch)

    check(program, make, dies=[2, 4, 5, ("end", 0), ("end", 1)])


def held_zip(run):
    for epoch in run.epochs(3):
        streams = run.batches("a"), run.batches("b")
        for pair in zip(*streams, strict=False):
            run.train(*pair)
        run.ends(epoch)


def test_a_shorter_loader_first_in_a_zip_over_held_iterators_begins_the_next_epoch():
    """W04: the body's end is done once."""
    check(held_zip, lambda: {"a": loader(batch_size=3), "b": loader(batch_size=2)}, dies=[4, ("end", 0), ("end", 1)])


def test_a_batch_that_zip_has_thrown_away_from_a_held_iterator_is_named():
    """A06, W04: it cannot be known whether it is trained on while its iterator exists."""
    run = Program(lambda: {"a": loader(batch_size=2), "b": loader(batch_size=3)}, die=("end", 0))
    with pytest.raises(IncompleteWindow, match=r"of \['a'\].*zip\(\).*\['b'\] had ended: put the loader"):
        held_zip(run)


def test_a_loop_that_leaves_right_after_a_save_inside_is_told_so_once(caplog):
    """W04: a resume from that save continues in the epoch."""
    live = Program().live
    for epoch in live.epochs(3):
        for _ in live.batches():
            live.advance()
            live.capture()
            if live.progress.step == epoch + 1:
                break
    assert caplog.text.count("continues in this epoch, and a plain loop begins the next one") == 1


def test_a_body_that_reads_its_epoch_in_two_parts_is_told_so_once(caplog):
    """W04: a plain loop would restart the epoch, and a resume between the parts starts the next one."""
    run = Program()
    for _ in run.live.epochs(2):
        for batch in itertools.islice(run.live.batches(), 2):
            run.train(batch)
        run.live.capture()
        for batch in run.live.batches():
            run.train(batch)
    assert caplog.text.count("plain loop over the loader would restart it") == 1


def test_a_save_between_the_loops_over_two_loaders_is_said_once(caplog):
    """W04: the save counts the body as done."""
    run = Program(lambda: {"a": loader(), "b": loader()})
    for _ in run.live.epochs(2):
        for name in ("a", "b"):
            for batch in run.live.batches(name):
                run.train(batch)
            if name == "a":
                run.live.capture()
    assert caplog.text.count("without the rest of this body") == 1


@pytest.mark.parametrize("moves", [True, False])
def test_a_save_before_the_first_batch_of_a_body_is_exact_where_nothing_was_done_and_said_where_something_was(
    moves, caplog
):
    """W04: a resume from it runs the body from its start."""

    def program(run):
        for epoch in run.epochs(3):
            if moves:
                schedules(run, epoch)
            run.dies(("begin", epoch))
            if not moves:
                schedules(run, epoch)
            for batch in run.batches():
                run.train(batch)

    whole = Program(is_plain=True)
    program(whole)
    assert (killed(program, loader, ("begin", 1)) == whole.events) is not moves
    assert ("so does all of this twice" in caplog.text) is moves


def test_a_loader_with_a_state_of_its_own_that_was_left_is_refused_at_a_resume_too():
    """W04: as it is when the loop goes on."""
    make = partial(StatefulDataLoader, Noisy(), batch_size=3)
    first = Program(make, die=("end", 0))
    with pytest.raises(Died):
        leaves(first)
    with pytest.raises(InvalidArgument, match="reads each epoch to its end"):
        leaves(Program(make, state=first.state))


@pytest.mark.parametrize("calls", ["nobody", "the body"])
def test_set_epoch_that_changes_an_order_is_said_once_unless_the_loop_calls_it_itself(calls, caplog):
    """G04: attaching changes what a plain loop without the call would have drawn, and logs it."""
    sampler = DistributedSampler(Noisy(), num_replicas=1, rank=0)
    run = Program(lambda: loader(sampler=sampler, shuffle=False))
    for epoch in run.live.epochs(3):
        if calls == "the body":
            sampler.set_epoch(epoch)
        for batch in run.live.batches():
            run.train(batch)
    assert caplog.text.count("set_epoch(1) is called on the DistributedSampler") == (calls == "nobody")
    assert "set_epoch(2)" not in caplog.text

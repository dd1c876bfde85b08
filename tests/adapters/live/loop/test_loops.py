"""Loops as users write them: epoch by epoch, over several loaders, one batch ahead, with their own generators."""

import itertools
import random
from functools import partial

import pytest
from kit.adapters.live.loops_cases import N, Noisy, Run, check, die, event, loader
from kit.depth import IS_DEEP
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.components.component import copied
from trainfold.core.errors import (
    InvalidArgument,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13


WORKERS = [{}, {"num_workers": 2}]


@pytest.mark.parametrize("arguments", WORKERS)
def test_an_epoch_wise_loop_with_work_at_the_end_of_each_epoch_is_resumed_at_every_step(arguments):
    """W04: also at an epoch's last batch, after which the loop still has work to do for that epoch."""

    def plain(data, events):
        for epoch in range(2):
            for batch in data:
                events.append(event(batch))
            events.append(["end of", epoch, random.random()])

    def loop(run):
        for epoch in run.live.epochs(2):
            for batch in run.live.batches():
                die(run, run.step(batch))
            run.events.append(["end of", epoch, random.random()])

    check(partial(loader, **arguments), loop, plain, kills=None if not arguments else [2, 4, 5] if IS_DEEP else [4])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}],
)
def test_an_epoch_that_is_left_early_is_followed_by_the_one_of_the_plain_loop(arguments):
    """W04: with workers that live on and have drawn ahead, too."""

    def plain(data, events):
        for epoch in range(3):
            for number, batch in enumerate(data):
                if epoch == 1 and number == 1:
                    break  # this batch was drawn and not trained on
                events.append(event(batch))

    def loop(run):
        for epoch in run.live.epochs(3):
            start = run.live.progress.samples
            for batch in run.live.batches():
                if epoch == 1 and run.live.progress.step == 5:
                    break
                die(run, run.step(batch))
            assert run.live.progress.samples - start <= N

    check(partial(loader, **arguments), loop, plain, kills=None if not arguments else [1, 6, 7] if IS_DEEP else [6])


def test_a_save_after_the_loop_over_the_batches_does_not_do_the_end_of_the_epoch_again():
    """W04: the body's code after its last batch runs once."""
    states = []

    def loop(live, ends, stop=None):
        for epoch in live.epochs(3):
            for _ in live.batches():
                live.advance()
            ends.append(epoch)
            states.append(copied(live.capture()))
            if epoch == stop:
                return

    first: list[int] = []
    loop(Run(loader).live, first, stop=1)
    resumed = Run(loader, state=states[-1])
    loop(resumed.live, first)
    assert first == [0, 1, 2]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_batches_that_are_left_over_at_the_end_of_an_epoch_are_given_up_as_the_plain_loop_does(kind):
    """A06, W04: windows of two in an epoch of four and a half of them."""

    def plain(data, events):
        for _ in range(2):
            for number, batch in enumerate(data):
                if number % 2:
                    events.append(event(batch))

    def loop(run):
        for _ in run.live.epochs(2):
            for number, batch in enumerate(run.live.batches()):
                if number % 2:
                    die(run, run.step(batch))

    check(partial(kind, Noisy(), batch_size=2, shuffle=True), loop, plain)


@pytest.mark.parametrize("sizes", [(3, 3), (3, 5), (5, 3)])
def test_zipped_loaders_are_resumed_at_every_step(sizes):
    """W04: each pass of the plain loop restarts both, and the longer one is left early."""

    def make():
        return {"labelled": loader(1, batch_size=sizes[0]), "unlabelled": loader(-1, batch_size=sizes[1])}

    def plain(data, events):
        for _ in range(2):
            for one, other in zip(data["labelled"], data["unlabelled"], strict=False):
                events.append(event(one, other))
            events.append([random.random()])

    def loop(run):
        for _ in run.live.epochs(2):
            pairs = zip(run.live.batches("labelled"), run.live.batches("unlabelled"), strict=False)
            for one, other in pairs:
                die(run, run.step(one, other))
            run.events.append([random.random()])

    check(make, loop, plain)


def test_loaders_that_are_read_at_their_own_pace_are_resumed_at_every_step():
    """W04: one is read epoch after epoch, the other endlessly and only occasionally."""

    def make():
        return {"a": loader(1, num_workers=1), "b": loader(-1, batch_size=4)}

    def loop(run):
        others = run.live.batches("b")
        for batch in run.live.batches("a", epochs=2):
            drawn = [next(others)] if (run.live.progress.step + 1) % 2 == 0 else []
            die(run, run.step(batch, *drawn))

    def plain(data, events):
        others = (batch for _ in iter(int, 1) for batch in data["b"])
        for batch in (batch for _ in range(2) for batch in data["a"]):
            drawn = [next(others)] if (len(events) + 1) % 2 == 0 else []
            events.append(event(batch, *drawn))

    check(make, loop, plain, kills=[2, 4, 5] if IS_DEEP else [4])


def again_by_next(batches):
    """As semi-supervised programs do."""
    others = iter(batches())
    while True:
        try:
            yield next(others)
        except StopIteration:
            others = iter(batches())
            yield next(others)


def again_by_a_generator(batches):
    while True:
        yield from batches()


@pytest.mark.parametrize("again", [again_by_next, again_by_a_generator])
@pytest.mark.parametrize("size", [4, 5])
def test_a_shorter_loader_that_is_begun_again_in_the_body_is_resumed_at_every_step(again, size):
    """W04: the plain loop gives it another order in each pass; attached, it used to end, and the program with it."""

    def make():
        return {"labelled": loader(1, batch_size=2), "unlabelled": loader(-1, batch_size=size)}

    def plain(data, events):
        for _ in range(2):
            for pair in zip(data["labelled"], again(lambda: data["unlabelled"]), strict=False):
                events.append(event(*pair))
            events.append([random.random()])

    def loop(run):
        for _ in run.live.epochs(2):
            pairs = zip(run.live.batches("labelled"), again(lambda: run.live.batches("unlabelled")), strict=False)
            for pair in pairs:
                die(run, run.step(*pair))
            run.events.append([random.random()])

    check(make, loop, plain, kills=[2, 3, 7])


def test_a_second_pass_over_a_loader_in_one_body_is_refused_and_no_longer_empty():
    """W04: a resume could not distinguish the two passes."""
    live = Run(loader).live
    for _ in live.epochs(1):
        for _ in live.batches():
            live.advance()
        with pytest.raises(InvalidArgument, match=r"a second one over the loader.*2 \* n"):
            live.batches()


def test_an_epoch_that_is_read_in_parts_by_steps_ends_with_an_empty_part():
    """W04: such a loop asks once more if its parts fit the epoch exactly, and this does not count as a second pass."""
    live = Run(partial(loader, batch_size=5)).live
    parts = []
    for _ in live.epochs(2):
        while (before := live.progress.step) is not None:
            for _ in live.batches(steps=before + 2):
                live.advance()
            parts.append(live.progress.step - before)
            if live.progress.step < before + 2:
                break
    assert parts == [2, 0, 2, 0]


def test_a_cycle_that_keeps_batches_of_its_own_is_refused_before_it_gives_them_again():
    """W04: its second pass does not come from a loader, and a resume silently gave other batches."""
    live = Run(lambda: {"a": loader(1), "b": loader(-1, batch_size=5)}).live
    epochs = live.epochs(2)
    next(epochs)
    pairs = zip(live.batches("a"), itertools.cycle(live.batches("b")), strict=False)
    for _ in range(2):
        next(pairs)
        live.advance()
    with pytest.raises(InvalidArgument, match=r"itertools\.cycle over 'b'.*yield from"):
        next(pairs)

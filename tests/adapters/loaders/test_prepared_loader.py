"""Loaders prepared by accelerate: the loop gets the same batches as before, and resumes at every step."""

import random
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from kit.depth import IS_DEEP
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import InvalidArgument, RestoreRefused

N = 10


class Noisy(Dataset):
    """Draws from the global streams."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), float(torch.rand(()))], dtype=torch.float64)


class LookAlike:
    """What ``DataLoaderShard`` of accelerate 1.15 does, in one process."""

    def __init__(self, base):
        self.base_dataloader = base
        self.iteration = 0
        self.told = []
        self.end_of_dataloader = False

    def __getattr__(self, name):
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    def __len__(self):
        return len(self.base_dataloader)

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        self.end_of_dataloader = False
        self.set_epoch(self.iteration)
        inner = self.base_dataloader.__iter__()
        try:
            current = next(inner)
        except StopIteration:
            return
        while True:
            try:
                following = next(inner)
            except StopIteration:
                self.end_of_dataloader = True
                yield current.clone()
                break
            yield current.clone()
            current = following
        self.iteration += 1


def prepared(base):
    if find_spec("accelerate") is None:
        return LookAlike(base)
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(base, num_processes=1, process_index=0, put_on_device=False)


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)


def make(wrap, **arguments):
    return wrap(DataLoader(Noisy(), batch_size=3, shuffle=True, **arguments))


def event(batch, loader):
    return batch.tolist(), float(torch.rand(())), random.random(), bool(loader.end_of_dataloader)


def start(maker, seed=1):
    model = torch.nn.Linear(1, 1)
    seed_all(seed)
    loader = maker()
    return attach(model, loader=loader), loader


def read(live, loader, until=None, *, by_epoch=False, leave=None):
    seen = []
    epochs = live.epochs(3) if by_epoch else [None]
    for _ in epochs:
        for batch in live.batches(**({} if by_epoch else {"epochs": 3})):
            if live.progress.step == leave:
                leave = None
                break
            seen.append(event(batch, loader))
            live.advance(samples=len(batch))
            if live.progress.step == until:
                return seen
    return seen


@pytest.mark.parametrize("wrap", [LookAlike, prepared])
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}])
@pytest.mark.parametrize("by_epoch", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_prepared_loader_is_resumed_at_every_step_and_gives_what_it_gave(wrap, arguments, by_epoch):
    """W04: the prepared loader draws one batch ahead of the loop."""
    if wrap is prepared and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    maker = partial(make, wrap, **arguments)
    seed_all(1)
    plain = maker()
    whole = [event(batch, plain) for _ in range(3) for batch in plain]
    live, loader = start(maker)
    assert read(live, loader, by_epoch=by_epoch) == whole
    assert loader.iteration == plain.iteration
    for kill in range(1, len(whole)) if not arguments else (2, 4, 5) if IS_DEEP else (2, 4):
        live, loader = start(maker)
        seen = read(live, loader, kill, by_epoch=by_epoch)
        state = copied(live.capture())
        live, loader = start(maker, seed=9)
        live.restore(state)
        seen += read(live, loader, by_epoch=by_epoch)
        assert seen == whole, kill
        assert loader.iteration == plain.iteration


def test_leaving_an_epoch_of_a_prepared_loader_early_begins_the_next_as_the_plain_loop_does():
    """W04: accelerate does not count an epoch that was left early."""
    seed_all(1)
    plain, whole = make(LookAlike), []
    for epoch in range(3):
        for number, batch in enumerate(plain):
            if epoch == 1 and number == 1:
                break
            whole.append(event(batch, plain))
    live, loader = start(partial(make, LookAlike))
    assert read(live, loader, by_epoch=True, leave=5) == whole
    assert loader.told == plain.told


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def test_a_prepared_loader_that_cannot_be_followed_is_refused_by_name():
    """W04: it is not an AttributeError at the first save."""
    for base in (DataLoader(Endless()),):
        with pytest.raises(InvalidArgument, match=r"LookAlike.*|passed to accelerator\.prepare"):
            attach(torch.nn.Linear(1, 1), loader=LookAlike(base))


def test_the_position_of_a_plain_loader_is_refused_by_a_prepared_one():
    live, _ = start(lambda: DataLoader(Noisy()))
    state = copied(live.capture())
    with pytest.raises(RestoreRefused, match="base_dataloader"):
        start(partial(make, LookAlike))[0].restore(state)


def test_a_loader_that_skips_batches_of_each_epoch_is_refused():
    """The position of the run says where to begin; accelerate's sampler would skip as many again in each epoch."""
    loader = make(LookAlike)
    loader.base_dataloader.batch_sampler.skip_batches = 2  # as `accelerate.skip_first_batches` makes it
    with pytest.raises(InvalidArgument, match="without skip_first_batches"):
        attach(torch.nn.Linear(1, 1), loader=loader)

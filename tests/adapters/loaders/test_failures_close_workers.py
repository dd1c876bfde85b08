"""A failure while a loader returns to its position ends the workers that it had started."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.live.attach import attach

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13


class Broken(Dataset):
    """Cannot be read any more at a resume, as behind a mount that is gone."""

    def __init__(self, is_broken):
        self.is_broken = is_broken

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.is_broken:
            raise OSError("stale file handle")
        return torch.tensor(index)


class BrokenStream(IterableDataset):
    """An iterable of the same kind; a resume draws its batches again."""

    def __init__(self, is_broken):
        self.is_broken = is_broken

    def __iter__(self):
        for index in range(12):
            yield Broken(self.is_broken)[index]


LOADERS = {
    "map": lambda is_broken: DataLoader(Broken(is_broken), batch_size=2, num_workers=1),
    "persistent": lambda is_broken: DataLoader(Broken(is_broken), batch_size=2, num_workers=1, persistent_workers=True),
    "stateful": lambda is_broken: StatefulDataLoader(Broken(is_broken), batch_size=2, num_workers=1),
    "iterable": lambda is_broken: StatefulDataLoader(BrokenStream(is_broken), batch_size=2, num_workers=1),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_no_worker_lives_as_long_as_the_error(kind):
    """G07: the traceback of the error holds the iterator, so a program that logs it would keep the workers."""
    live = attach(torch.nn.Flatten(), loader=LOADERS[kind](False))
    batches = live.batches(epochs=1)
    for _ in range(2):
        next(batches)
        live.advance()
    state = live.capture()
    del batches, live
    before = {each.pid for each in multiprocessing.active_children()}
    other = attach(torch.nn.Flatten(), loader=LOADERS[kind](True))
    other.restore(state)
    with pytest.raises(OSError, match="stale file handle") as told:
        next(other.batches(epochs=1))
    left = {each.pid for each in multiprocessing.active_children()} - before
    assert told.value is not None
    assert not left

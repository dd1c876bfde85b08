"""Helpers shared by the tests of positions."""

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from trainfold.adapters.live.attach import attach

N = 14


class Numbers(Dataset):
    """The sample is its index; it remembers what was read."""

    def __init__(self, n=N):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(int(index))
        return torch.tensor(index)


class Noisy(Numbers):
    """Augmentation from the global streams, in the main process."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), float(torch.rand(()))], dtype=torch.float64)


class PythonShuffle(Sampler[int]):
    """Draws its order from python's stream, when the epoch begins."""

    def __iter__(self):
        order = list(range(N))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return N


class Buckets:
    """A batch sampler with batches of different lengths, an epoch of its own, and no batch_size."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(N).tolist()
        yield from (order[:3], order[3:4], order[4:9], order[9:13], order[13:])

    def __len__(self):
        return 5


class Stream(IterableDataset):
    """An iterable dataset that knows its position and not its length."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Forgetful(IterableDataset):
    """An iterable dataset without a state; with workers, each has its part."""

    def __iter__(self):
        worker = get_worker_info()
        yield from map(torch.tensor, range(N) if worker is None else range(worker.id, N, worker.num_workers))


class Measured(Forgetful):
    """One that knows its length."""

    def __len__(self):
        return N


class Shuffling(Forgetful):
    """One with a shuffle buffer, and augmentation: it draws from the global streams at every sample."""

    def __iter__(self):
        held = []
        for number in super().__iter__():
            held.append(torch.tensor([number, random.random(), float(torch.rand(()))]))
            if len(held) == 4:
                yield held.pop(random.randrange(4))
        random.shuffle(held)
        yield from held


class Remembered:
    """The iterator of the next."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == N:
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Remembering(IterableDataset):
    """One whose iterator has the state, and not the dataset."""

    def __iter__(self):
        return Remembered()


class Shards(Forgetful):
    """One with a state, in workers."""

    def __init__(self, n=N):
        self.n = n
        self.at = 0

    def __iter__(self):
        for number in [i for i in super().__iter__() if i < self.n][self.at :]:
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Counting(Numbers):
    """A map-style dataset with a state: every sample says how many were read before it."""

    def __getitem__(self, index):
        super().__getitem__(index)
        return torch.tensor([index, len(self.read)])

    def state_dict(self):
        return {"read": list(self.read)}

    def load_state_dict(self, state):
        self.read = list(state["read"])


class Bookmark(Sampler[int]):
    """A sampler with a state."""

    def __init__(self):
        self.order, self.at = [], 0

    def __iter__(self):
        if not self.order:
            self.order = torch.randperm(N).tolist()
        while self.at < N:
            self.at += 1
            yield self.order[self.at - 1]
        self.order, self.at = [], 0

    def __len__(self):
        return N

    def state_dict(self):
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = list(state["order"]), state["at"]


class Pages:
    """A user's own loader, not a DataLoader."""

    def __init__(self):
        self.page = 0

    def __iter__(self):
        while self.page < 5:
            self.page += 1
            yield [self.page, random.random()]
        self.page = 0

    def state_dict(self):
        return {"page": self.page}

    def load_state_dict(self, state):
        self.page = state["page"]


def generator():
    return torch.Generator().manual_seed(int(torch.initial_seed()) % 1000)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled, augmented": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "shuffled, drop_last": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(
        Numbers(),
        batch_size=4,
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=generator()),
    ),
    "replacement": lambda: DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True)),
    "python's stream": lambda: DataLoader(Numbers(), batch_size=4, sampler=PythonShuffle()),
    "distributed": lambda: DataLoader(
        Numbers(2 * N), batch_size=4, sampler=DistributedSampler(Numbers(2 * N), num_replicas=2, rank=1, seed=5)
    ),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True),
    "stateful, augmented": lambda: StatefulDataLoader(Noisy(), batch_size=4, shuffle=True),
    "stateful, own generator": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "stateful, in order": lambda: StatefulDataLoader(Numbers(), batch_size=4),
    "stateful stream": lambda: StatefulDataLoader(Stream(), batch_size=4),
    "stateful, replacement": lambda: StatefulDataLoader(
        Numbers(),
        batch_size=4,
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=generator()),
    ),
    "stateful, python's stream": lambda: StatefulDataLoader(Numbers(), batch_size=4, sampler=PythonShuffle()),
    "stateful, batch sampler": lambda: StatefulDataLoader(Numbers(), batch_sampler=Buckets()),
    "stateful, distributed": lambda: StatefulDataLoader(
        Numbers(2 * N), batch_size=4, sampler=StatefulDistributedSampler(Numbers(2 * N), num_replicas=2, rank=1, seed=5)
    ),
    "stateful, sampler with a state": lambda: StatefulDataLoader(Numbers(), batch_size=4, sampler=Bookmark()),
    "stateful, sampler with a state in torch's batches": lambda: StatefulDataLoader(
        Numbers(), batch_sampler=BatchSampler(Bookmark(), 4, drop_last=False)
    ),
    "stateful, dataset with a state": lambda: StatefulDataLoader(Counting(), batch_size=4, shuffle=True),
    "stateful, dataset and torch's sampler": lambda: StatefulDataLoader(
        Counting(), batch_size=4, sampler=SubsetRandomSampler(range(N))
    ),
    "stateful, dataset and batches in order": lambda: StatefulDataLoader(
        Counting(), batch_sampler=BatchSampler(SequentialSampler(range(N)), 4, drop_last=False)
    ),
    "stateful, no batches": lambda: StatefulDataLoader(Numbers(), batch_size=None, shuffle=True),
    "stateful stream, no batches": lambda: StatefulDataLoader(Stream(), batch_size=None),
    "stateful stream, iterator with a state": lambda: StatefulDataLoader(Remembering(), batch_size=4),
    "stream without a state": lambda: StatefulDataLoader(Forgetful(), batch_size=4),
    "stream without a state, drop_last": lambda: StatefulDataLoader(Forgetful(), batch_size=4, drop_last=True),
    "stream without a state, no batches": lambda: StatefulDataLoader(Forgetful(), batch_size=None),
    "stream without a state, with a length": lambda: StatefulDataLoader(Measured(), batch_size=4),
    "stream without a state, shuffled": lambda: StatefulDataLoader(Shuffling(), batch_size=4),
    "stream without a state, own generator": lambda: StatefulDataLoader(
        Shuffling(), batch_size=4, generator=generator()
    ),
    "own class": Pages,
}


class Reader:
    """A live run that only reads; each batch also draws from the global streams, as a training step would."""

    def __init__(self, make, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global stream is the subject)
        self.loader = make()
        self.live = attach(torch.nn.Linear(1, 1), loader=self.loader)

    def read(self, until):
        seen = []
        for batch in self.live.batches(steps=until):
            seen.append((np.asarray(batch).tolist(), float(torch.rand(())), random.random()))
            self.live.advance(samples=None if isinstance(batch, list) or batch.dim() == 0 else len(batch))
        return seen

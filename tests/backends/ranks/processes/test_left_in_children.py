"""A forked child, such as a worker of a loader, neither waits for nor crashes on the groups that its parent has dropped."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainfold.backends.ranks.torch_distributed import TorchCollectives

PATIENT = {"timeout_secs": 30.0, "grace_secs": 3.0}


class Collects(Dataset):
    """A dataset during whose reading the garbage collector runs."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(index)


class Holder:
    """Refers to itself, so that only the garbage collector frees it and what it holds."""

    def __init__(self, held):
        self.held, self.me = held, self


def read_after_dropping(collectives, make):
    gc.disable()  # so that it is a worker that finds what was dropped
    made = {"own": lambda: TorchCollectives(**PATIENT), "tree": lambda: TorchCollectives(**PATIENT, topology="tree"),
            "duplicate": collectives.duplicate, "nothing": lambda: None}[make]()  # fmt: skip
    if made is not None:
        assert made.gather(made.rank) == [0, 1]
    Holder(made)
    del made
    loader = DataLoader(Collects(), batch_size=2, num_workers=1, timeout=60, multiprocessing_context="fork")
    return [batch.tolist() for batch in loader]


@pytest.mark.slow(3)
@pytest.mark.parametrize("make", ["own", "duplicate", "tree", pytest.param("nothing", marks=pytest.mark.long)])
def test_workers_of_a_rank_that_has_dropped_collectives_give_their_batches(processes, make):
    """G07, C07: the worker's garbage collector ended the group, which waited for threads that a fork does not copy; no batch ever came."""
    assert processes.run(2, read_after_dropping, make, collectives=PATIENT) == [[[0, 1], [2, 3]]] * 2

"""torchdata's loader over a dataset with a state is kept for each share of the data."""

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.stores.memory import MemoryStore
from trainfold.ranks import Replicas

LENGTH = 6


class Part(IterableDataset):
    """One share of a stream, which knows how far it is."""

    def __init__(self, share):
        self.share, self.at = share, 0

    def __iter__(self):
        while self.at < LENGTH:
            self.at += 1
            yield torch.tensor(self.share * 100 + self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
def test_a_share_of_torchdatas_loader_that_joins_begins_the_epoch_in_which_the_others_are():
    """G05, N06: the share that was saved continues; a resume of both is exact."""
    store = MemoryStore()

    def read(ranks, upto, **options):
        loader = StatefulDataLoader(Part(ranks.rank), batch_size=None)
        live = attach(torch.nn.Flatten(), loader=loader, parallelism=Replicas(ranks))
        with CheckpointManager(store, collectives=ranks, **options) as manager:
            manager.restore(live)
            found = []
            for batch in live.batches(steps=upto):
                found.append(int(batch))
                live.advance(samples=1)
            manager.save(live)
        return found, live.progress.epoch

    run_threads(1, lambda ranks: read(ranks, LENGTH + 2))
    joined = run_threads(2, lambda ranks: read(ranks, LENGTH + 4, policy={"data_ranks": "adapt"}))
    assert joined == [([2, 3], 1), ([100, 101], 1)]
    assert run_threads(2, lambda ranks: read(ranks, LENGTH + 5)) == [([4], 1), ([102], 1)]

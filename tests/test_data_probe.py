"""The data probe: the last batch is drawn again at a resume, and compared before training goes on."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import trainfold
from trainfold.adapters.components.component import copied
from trainfold.adapters.live.live import attach
from trainfold.adapters.loaders.batch_digest import batch_digest
from trainfold.core.errors import DataPositionMismatch

N = 12


class Data(Dataset):
    """Behind one length, different things."""

    def __init__(self, *, scale=1.0, draws=False, counts=False):
        self.scale = scale
        self.draws = draws
        self.count = 0
        self.counts = counts
        self.reads = 0

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.reads += 1
        self.count += self.counts
        noise = random.random() + float(torch.rand(())) if self.draws else 0.0
        return torch.tensor([index * self.scale + noise + self.count], dtype=torch.float64)


def doubling(samples):
    return 2 * torch.stack(samples)


def start(workers, dataset=None, **arguments):
    torch.manual_seed(3)
    random.seed(3)
    loader = DataLoader(dataset or Data(), batch_size=2, shuffle=True, num_workers=workers, **arguments)
    return attach(torch.nn.Linear(1, 1), loader=loader, unsaved=["loader.dataset"])  # it counts for the tests


def stopped(workers, steps, dataset=None):
    live = start(workers, dataset)
    for _ in live.batches(steps=steps):
        torch.rand(())
        live.advance()
    return copied(live.capture())


OTHERS: dict[str, Any] = {
    "dataset": {"dataset": Data(scale=3.0)},
    "collate": {"collate_fn": doubling},
    "transform": {"dataset": Data(draws=True)},
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_other_data_behind_the_same_length_are_refused_before_training_goes_on(name, workers):
    """W03: another dataset, collate or transform; as often as it is asked, and in each epoch."""
    for steps in (3, 8) if not workers else (3,):
        state = stopped(workers, steps)
        live = start(workers, **OTHERS[name])
        live.restore(state)
        for _ in range(2):
            with pytest.raises(DataPositionMismatch, match="transforms, the tokenizer and the collate_fn"):
                next(live.batches())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("draws", [False, True])
def test_the_probe_moves_no_stream(workers, draws):
    """W03: the run goes on as if nothing had been drawn again."""
    dataset = partial(Data, draws=draws)
    live = start(workers, dataset())
    whole = []
    for batch in live.batches(epochs=2):
        whole.append((batch.tolist(), float(torch.rand(())), random.random()))
        live.advance()
    for policy in ({}, {"data_probe": "warn"}, {"data_probe": "adapt"}):
        first = start(workers, dataset())
        for _ in first.batches(steps=4):
            torch.rand(())
            random.random()
            first.advance()
        state = copied(first.capture())
        resumed = start(workers, dataset())
        resumed.restore(state, policy=policy)
        seen = []
        for batch in resumed.batches(epochs=2):
            seen.append((batch.tolist(), float(torch.rand(())), random.random()))
            resumed.advance()
        assert seen == whole[4:], policy


def test_a_policy_turns_the_refusal_into_a_warning_or_draws_nothing(caplog):
    """W03: for other data on purpose, and for data that cannot be read twice."""
    state = stopped(0, 3)
    live = start(0, Data(scale=3.0))
    live.restore(state, policy={"data_probe": "warn"})
    next(live.batches())
    assert "drawn again" in caplog.text
    dataset = Data()
    live = start(0, dataset)
    live.restore(state, policy={"data_probe": "adapt"})
    next(live.batches())
    assert dataset.reads == 2


def test_a_dataset_that_counts_for_itself_is_found_out():
    """W03: its counter begins anew in the new process, and is in no state."""
    state = stopped(0, 3, Data(counts=True))
    live = start(0, Data(counts=True))
    live.restore(state)
    with pytest.raises(DataPositionMismatch, match="drawn again"):
        next(live.batches())


def test_at_the_end_of_an_epoch_there_is_no_batch_to_draw_again():
    state = stopped(0, N // 2)
    dataset = Data(scale=3.0)
    live = start(0, dataset)
    live.restore(state)
    next(live.batches())
    assert dataset.reads == 2


def test_a_batch_that_the_loop_changes_in_place_is_known_as_it_was():
    """W03: its digest is taken when it is handed out."""
    live = start(0)
    for batch in live.batches(steps=3):
        batch.zero_()
        live.advance()
    state = copied(live.capture())
    resumed = start(0)
    resumed.restore(state)
    next(resumed.batches())


def test_the_policy_of_the_manager_reaches_the_probe(tmp_path):
    """W03."""
    with trainfold.CheckpointManager(str(tmp_path / "run"), every=1) as manager:
        live = start(0)
        for _ in live.batches(steps=3):
            live.advance()
            manager.step(live)
    with trainfold.CheckpointManager(str(tmp_path / "run"), every=1) as manager:
        other = start(0, Data(scale=3.0))
        manager.restore(other)
        with pytest.raises(DataPositionMismatch):
            next(other.batches())
    with trainfold.CheckpointManager(str(tmp_path / "run"), every=1, policy={"data_probe": "adapt"}) as manager:
        other = start(0, Data(scale=3.0))
        manager.restore(other)
        next(other.batches())


class Encoding:
    """A batch of a class of somebody's own."""

    def __init__(self, **fields):
        self.fields = fields


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        ({"a": 1}, {"b": 1}),
        ([1, [2]], [[1], 2]),
        (Encoding(x=torch.zeros(1)), Encoding(x=torch.ones(1))),
        ("text", "test"),
        (np.zeros(2), np.ones(2)),
        ((1, None), (1, 0)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
    ],
)
def test_batches_that_differ_have_different_digests(one, other):
    assert batch_digest(one) != batch_digest(other)
    assert batch_digest(one) == batch_digest(one)


def test_the_digest_of_an_object_is_not_that_of_its_address():
    assert batch_digest([Encoding(x=1, y=object())]) == batch_digest([Encoding(x=1, y=object())])

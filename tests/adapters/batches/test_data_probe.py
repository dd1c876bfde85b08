"""The data probe draws the last batch again at a resume and compares it before training continues."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kit.depth import IS_DEEP
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import trainfold
from trainfold.adapters.batches.batch_digest import batch_digest, batch_kind
from trainfold.adapters.components.component import copied
from trainfold.adapters.live.attach import attach
from trainfold.core.errors import DataPositionMismatch
from trainfold.core.state.state import Opaque

N = 12
pytestmark = [
    pytest.mark.slow(0.2),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
]


class Data(Dataset):
    """A dataset whose samples can change while its length stays the same."""

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


def start(workers, dataset=None, kind=DataLoader, **arguments):
    torch.manual_seed(3)
    random.seed(3)
    loader = kind(dataset or Data(), batch_size=2, shuffle=True, num_workers=workers, **arguments)
    return attach(torch.nn.Linear(1, 1), loader=loader, unsaved=["loader.dataset"])  # a counter for the tests


def stopped(workers, steps, dataset=None, kind=DataLoader):
    live = start(workers, dataset, kind)
    for _ in live.batches(steps=steps):
        torch.rand(())
        live.advance()
    return copied(live.capture())


OTHERS: dict[str, Any] = {
    "dataset": {"dataset": Data(scale=3.0)},
    "collate": {"collate_fn": doubling},
    "transform": {"dataset": Data(draws=True)},
}


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_other_data_behind_the_same_length_are_refused_before_training_goes_on(name, workers, kind):
    """W03: another dataset, collate or transform; at every attempt, in each epoch, and also after its first batch."""
    for steps in (1, 3, 7, 8) if not workers else (3,):
        state = stopped(workers, steps, kind=kind)
        live = start(workers, kind=kind, **OTHERS[name])
        live.restore(state)
        for _ in range(2):
            with pytest.raises(
                DataPositionMismatch, match="use the dataset, transforms, tokenizer, collate_fn and sampler"
            ):
                next(live.batches())


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("draws", [False, True])
def test_the_probe_moves_no_stream(workers, draws, kind):
    """W03: the run continues as if no batch had been drawn again."""
    dataset = partial(Data, draws=draws)
    live = start(workers, dataset(), kind)
    whole = []
    for batch in live.batches(epochs=2):
        whole.append((batch.tolist(), float(torch.rand(())), random.random()))
        live.advance()
    policies = ({}, {"data_probe": "warn"}, {"data_probe": "adapt"})
    for policy in policies if IS_DEEP or not workers else policies[:1]:
        first = start(workers, dataset(), kind)
        for _ in first.batches(steps=4):
            torch.rand(())
            random.random()
            first.advance()
        state = copied(first.capture())
        resumed = start(workers, dataset(), kind)
        resumed.restore(state, policy=policy)
        seen = []
        for batch in resumed.batches(epochs=2):
            seen.append((batch.tolist(), float(torch.rand(())), random.random()))
            resumed.advance()
        assert seen == whole[4:], policy


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_policy_turns_the_refusal_into_a_warning_or_draws_nothing(kind, caplog):
    """W03: for data changed on purpose, and for data that cannot be read twice."""
    state = stopped(0, 3, kind=kind)
    live = start(0, Data(scale=3.0), kind)
    live.restore(state, policy={"data_probe": "warn"})
    next(live.batches())
    assert "drawn again" in caplog.text
    dataset = Data()
    live = start(0, dataset, kind)
    live.restore(state, policy={"data_probe": "adapt"})
    next(live.batches())
    assert dataset.reads == 2
    assert "not compared" not in caplog.text


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dataset_that_counts_for_itself_is_found_out(kind):
    """W03: its counter restarts in the new process, and no state contains it."""
    state = stopped(0, 3, Data(counts=True), kind)
    live = start(0, Data(counts=True), kind)
    live.restore(state)
    with pytest.raises(DataPositionMismatch, match="drawn again"):
        next(live.batches())


class Shifted(IterableDataset):
    """A stream with a state; it adds to each sample what it drew when its iteration started."""

    def __init__(self, *, late):
        self.at = 0
        self.late = late

    def __iter__(self):
        return self.numbers(None if self.late else random.random())

    def numbers(self, shift):
        shift = random.random() if shift is None else shift
        while self.at < 3 * N:
            self.at += 1
            yield torch.tensor([self.at + shift, random.random()], dtype=torch.float64)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(("workers", "late"), [(0, False), (0, True), (2, False), (2, True)])
def test_a_stream_that_draws_when_its_iteration_starts_is_exact_or_refused(workers, late):
    """W03: a resume starts the iteration again, and its draws then cannot be distinguished from those for a batch."""

    def make():
        torch.manual_seed(3)
        random.seed(3)
        data = StatefulDataLoader(Shifted(late=late), batch_size=3, num_workers=workers)
        return attach(torch.nn.Linear(1, 1), loader=data, unsaved=["loader.dataset"])

    def read(live, until):
        return [(batch.tolist(), random.random()) for batch in live.batches(steps=until) if live.advance()]

    whole, found, kills = read(make(), 6), {}, (1, 2, 3, 5) if IS_DEEP or not workers else (1, 3)
    for kill in kills:
        live = make()
        seen, state = read(live, kill), copied(live.capture())
        resumed = make()
        resumed.restore(state)
        try:
            seen += read(resumed, 6)
        except DataPositionMismatch:
            found[kill] = "refused"
        else:
            found[kill] = "exact" if seen == whole else "another run"
    exact = {(0, False): (1, 2, 3, 5), (0, True): (1,)}.get((workers, late), (1, 2))
    assert found == {kill: "exact" if kill in exact else "refused" for kill in kills}


class Buffered(Shifted):
    """A dataset with a large state."""

    def state_dict(self):
        return {"at": self.at, "buffer": torch.zeros(2_000_000)}


class Own:
    """A loader with a state, of a class that trainfold does not know."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < N:
            self.at += 1
            yield torch.tensor([float(self.at)])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("make", [lambda: StatefulDataLoader(Buffered(late=False), batch_size=3), Own])
def test_data_that_are_not_compared_at_a_resume_are_said_once(make, caplog):
    """W03: if a batch cannot be drawn again, or the state is too large to be read at each batch."""
    live = attach(torch.nn.Linear(1, 1), loader=make())
    for _ in live.batches(steps=3):
        live.advance()
    state = copied(live.capture())
    for policy, times in (({}, 1), ({"data_probe": "adapt"}, 0)):
        caplog.clear()
        resumed = attach(torch.nn.Linear(1, 1), loader=make())
        resumed.restore(state, policy=policy)
        for _ in resumed.batches(steps=5):
            resumed.advance()
        assert caplog.text.count("are not compared") == times


def test_at_the_end_of_an_epoch_there_is_no_batch_to_draw_again():
    state = stopped(0, N // 2)
    dataset = Data(scale=3.0)
    live = start(0, dataset)
    live.restore(state)
    next(live.batches())
    assert dataset.reads == 2


def test_a_batch_that_the_loop_changes_in_place_is_known_as_it_was():
    """W03: its digest is computed before the loop gets it."""
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
    """A batch of a user's own class."""

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


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_of_a_large_tensor_blocks_are_compared(kind):
    """W03: a change of all samples, or of the first or last value, is found; a change of one value between may not be."""
    values = np.arange(1 << 16, dtype=np.float32)  # 256 KiB
    one = batch_digest(kind(values))
    for change in (0, -1, slice(1 << 12), slice(None)):
        other = values.copy()
        other[change] += 1
        assert batch_digest(kind(other)) != one
    between = values.copy()
    between[2000] += 1
    assert batch_digest(kind(between)) == one
    assert batch_digest(kind(values.reshape(2, -1))) != one


def test_the_error_says_what_differs_and_names_the_sampler():
    """W03: shapes, types and keys of both batches, where they differ. Only random data look the same: then the seed comes first."""
    state = stopped(0, 3)
    other_values = (Data(scale=3.0), "looks the same but has other values", "seed before the data are made")
    for dataset, differs, first in (other_values, (Whole(), r"int64\[2\]", "use the dataset")):
        live = start(0, dataset)
        live.restore(state)
        with pytest.raises(DataPositionMismatch, match=rf"float64\[2, 1\].*{differs}.*sampler.*extra=") as caught:
            next(live.batches())
        assert caught.value.fix.startswith(first)


class Whole(Data):
    def __getitem__(self, index):
        return torch.tensor(index)


def test_a_digest_of_an_older_trainfold_is_not_compared_and_that_is_said(caplog):
    """V09: the older digest covered every byte."""
    state = stopped(0, 3)
    value = state.dataset.value
    draws = {name: held for name, held in value["draws"].items() if name != "lasts"}
    old = {**value, "draws": {**draws, "last": {"digest": "xxh3:0", "samples": 2, "before": {}}}}
    live = start(0)
    live.restore(state.evolve(dataset=Opaque(old)))
    next(live.batches())
    assert "not compared" in caplog.text


def test_the_digest_of_an_object_is_not_that_of_its_address():
    assert batch_digest([Encoding(x=1, y=object())]) == batch_digest([Encoding(x=1, y=object())])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_compared_by_its_parts(layout):
    """W03: such a tensor has no shape, or a shape with a new symbol at each draw; such a batch used to fail at the first step."""

    def batch(last):
        return {"x": torch.nested.nested_tensor([torch.ones(2), torch.tensor([1.0, 2.0, last])], layout=layout)}

    assert batch_digest(batch(3.0)) == batch_digest(batch(3.0)) != batch_digest(batch(4.0))
    assert batch_kind(batch(3.0)) == "{x: nested float32}"

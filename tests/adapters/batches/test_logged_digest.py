"""The digest of a batch for a flight log: a replaced sample always shows in it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from trainfold import CheckpointManager, attach
from trainfold.adapters.batches.batch_digest import PREFIX, WHOLE, batch_digest, batch_digests, logged_digest
from trainfold.backends.flight.flights import read_flights

SIZE = 1 << 17  # bytes: above what the digest for a resume reads whole


class Box:
    def __init__(self, value):
        self.value = value


HELD = {
    "a tensor": torch.from_numpy,
    "columns": lambda data: torch.from_numpy(data).reshape(-1, 2).t(),
    "an array": lambda data: data,
    "in an object": lambda data: {"x": [Box(torch.from_numpy(data)), "y"]},
    "bytes": bytes,
    "a bytearray": bytearray,
    "texts": lambda data: data.view("U8"),
    "dates": lambda data: data.view("datetime64[s]"),
}


@pytest.mark.parametrize("held", HELD)
@given(at=st.integers(0, SIZE // 4 - 1), bit=st.integers(0, 6))
def test_each_bit_of_a_batch_counts(held, at, bit):
    """And the digest says that it covers every byte."""
    data = np.zeros(SIZE, np.uint8)
    one = logged_digest(HELD[held](data))
    data[4 * at] ^= 1 << bit
    other = logged_digest(HELD[held](data))
    assert one != other
    assert one.startswith(WHOLE)
    assert other.startswith(WHOLE)


@pytest.mark.parametrize(
    "batch", [torch.ones(9), [np.ones(9), "text", None, 3], {"x": torch.ones(9).reshape(3, 3).t()}]
)
def test_a_small_batch_is_read_whole_in_any_case(batch):
    """Whether it was digested for a log or not: the digests of both are one."""
    assert batch_digests(batch, is_logged=True) == batch_digests(batch, is_logged=False)
    assert batch_digests(batch, is_logged=False) == (batch_digest(batch), logged_digest(batch))
    assert logged_digest(batch).startswith(WHOLE)


def test_a_batch_with_a_value_that_cannot_be_read_says_that_it_is_not_read_whole():
    batch = [torch.zeros(SIZE), {1, 2}]
    assert logged_digest(batch) == batch_digest(batch) == batch_digests(batch, is_logged=True)[1]
    assert logged_digest(batch).startswith(PREFIX)


def recorded(run, replaced, *, workers=0, kind=torch.utils.data.DataLoader, window=1):
    """The records of a run of four batches, of which one sample is replaced by another one."""
    torch.manual_seed(0)
    data = torch.randn(512, 3, 16, 16)
    if replaced is not None:
        data[replaced] = 1.0
    model = torch.nn.Linear(1, 1)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=kind(data, batch_size=128, num_workers=workers))  # fmt: skip
    with CheckpointManager(run, every=None, every_secs=999, record=0) as manager:
        manager.restore(live)
        for number, _ in enumerate(live.batches(epochs=1)):
            if number % window == window - 1:
                live.advance(samples=128 * window)
                manager.step(live)
    records = read_flights(run)[0].steps.values()
    assert all(each.is_whole for each in records)
    return [each.batch for each in records]


@pytest.mark.parametrize("options", [
    {},
    {"window": 2},
    pytest.param({"workers": 1}, marks=[pytest.mark.long, pytest.mark.slow(30)]),
])  # fmt: skip
def test_a_sample_that_is_replaced_shows_in_its_step(tmp_path, options):
    """Sample 130 lies between the blocks that are compared at a resume, in the second of four batches; of a window, each batch counts."""
    one, other = recorded(tmp_path / "a", None, **options), recorded(tmp_path / "b", 130, **options)
    step = 1 // options.get("window", 1)
    assert [a == b for a, b in zip(one, other, strict=True)] == [number != step for number in range(len(one))]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=[pytest.mark.long, pytest.mark.slow(30)])])
def test_a_sample_that_is_replaced_shows_with_a_loader_that_has_a_state(tmp_path, workers):
    one, other = (
        recorded(tmp_path / str(each), each, workers=workers, kind=StatefulDataLoader) for each in (None, 130)
    )
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True, True]

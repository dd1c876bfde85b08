"""Bisect where batches differ in one sample alone, and where the logs have digests of samples of the batches."""

import attrs
import numpy as np
import pytest
import torch

from trainfold import CheckpointManager, attach
from trainfold.adapters.cli.flights.bisect_runs import bisect_runs
from trainfold.core.flight.log_lines import LINE_BYTES, decode_line, encode_lines
from trainfold.core.flight.step_record import StepRecord


def train(run, *, replaced=False, rate=0.01):
    """Four batches of 128 images; sample 130 lies between the blocks that a resume compares."""
    torch.manual_seed(0)
    data, model = torch.randn(512, 3, 16, 16), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 1))
    data[130] = 1.0 if replaced else data[130]
    sgd = torch.optim.SGD(model.parameters(), lr=rate)
    live = attach(model, sgd, loader=torch.utils.data.DataLoader(data, batch_size=128))
    with CheckpointManager(run, every=1, record=1) as manager:
        manager.restore(live)
        for x in live.batches(epochs=1):
            loss = model(x).square().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            live.record(loss=loss)
            live.advance(samples=len(x))
            manager.step(live)


def make_old(run, *, is_alike):
    """The log as an older version has it, with digests of samples; of the same batches in both runs, or of others."""
    log = run / "flight-00000.log"
    data = log.read_bytes()
    lines = [decode_line(data[at : at + LINE_BYTES]) for at in range(0, len(data), LINE_BYTES)]
    old = (attrs.evolve(each, is_whole=False, batch=bytes(8) if is_alike else each.batch) if isinstance(each, StepRecord) else each for each in lines)  # fmt: skip
    log.write_bytes(encode_lines(old))


def train_noisy(run, *, skips):
    """A loop whose data draws from numpy; it may leave out the third batch, by `continue`."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global stream is the subject)
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Noisy(torch.arange(12.0).reshape(12, 1) / 12)
    live = attach(model, sgd, loader=torch.utils.data.DataLoader(data, batch_size=2))
    with CheckpointManager(run, every=100, record=0) as manager:
        manager.restore(live)
        for at, x in enumerate(live.batches(epochs=1)):
            if skips and at == 2:
                continue
            loss = model(x).square().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            live.record(loss=loss)
            live.advance(samples=len(x))
            manager.step(live)
            if live.progress.step == 4:
                break


class Noisy(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + float(np.random.rand())  # noqa: NPY002


def parted(tmp_path):
    return bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "scratch", patience_secs=60).data


def test_one_sample_that_is_replaced_is_another_batch(tmp_path):
    train(tmp_path / "a")
    train(tmp_path / "b", replaced=True)
    found = parted(tmp_path)
    assert (found["step"], found["cause"]) == (2, "batch"), found["text"]


@pytest.mark.parametrize("both", [True, False])
def test_where_samples_of_the_batches_are_all_that_is_known_another_batch_is_not_excluded(tmp_path, both):
    """Nor is one claimed where one log covers every byte, and the other, of an older version, samples."""
    train(tmp_path / "a")
    train(tmp_path / "b", replaced=True)
    make_old(tmp_path / "a", is_alike=True)
    if both:
        make_old(tmp_path / "b", is_alike=True)
    found = parted(tmp_path)
    assert found["step"] == 2
    assert found["cause"] != "batch"
    assert "batch" in found["may_be"], found["text"]
    assert any("were not compared" in each for each in found["warnings"]) != both
    assert ("batch as far as samples of it show" in found["difference"]["same"]) == both


def test_a_batch_that_one_loop_left_out_is_not_called_the_same(tmp_path):
    """They "drew other random numbers, from the same batch on", and no digest of that batch was compared."""
    train_noisy(tmp_path / "a", skips=False)
    train_noisy(tmp_path / "b", skips=True)
    found = parted(tmp_path)
    assert (found["step"], found["cause"], found["may_be"][0]) == (3, "streams", "batch"), found["text"]
    assert "same batch" not in found["text"]
    assert "that they read the same data is not known" in found["text"]
    assert found["warnings"] == [
        "the batches of step 3 are not recorded in B: the loop read others than those of `live.batches`, or left out one without `live.drop_window()`"
    ]

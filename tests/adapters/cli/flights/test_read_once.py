"""What a bisection reads: in a bucket each list of a run is a request for each of its checkpoints."""

from collections import Counter

import pytest
from kit.adapters.manager import replay_cases
from kit.adapters.manager.parting_cases import flip_a_bit, train

from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore

bisected = replay_cases.bisected


@pytest.fixture
def reads(monkeypatch):
    """Counts the reads of each file, as (run, file)."""
    found, read = Counter(), LocalStore.read

    def counted(self, name, *args, **kwargs):
        found[self.url.rpartition("/")[2], name] += 1
        return read(self, name, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "read", counted)
    return found


def test_each_run_is_listed_once_however_many_checkpoints_are_compared(bisected, reads, tmp_path):
    """It was listed four times, and once more for each checkpoint that was compared: for two runs of a hundred, 40,000 requests."""
    train(tmp_path / "a", every=1, steps=6, record=0)
    train(tmp_path / "b", every=1, steps=6, at_four=flip_a_bit, record=0)
    reads.clear()
    read_inventory(str(tmp_path / "a"))
    listed = reads["a", "step-00000006/manifest.json"]
    reads.clear()
    assert bisected().data["step"] == 4
    assert [reads[run, "step-00000006/manifest.json"] for run in "ab"] == [listed, listed]

"""What waits for its upload is given up only where another try would fail in the same way."""

import errno
import os
import time
from pathlib import Path

import pytest
from kit.backends.runs_cases import state_at

import trainfold
from trainfold import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import uploads
from trainfold.backends.tiers.two_tiers import TwoTiers


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_what_the_disk_does_not_give_for_a_while_is_uploaded_when_it_does(tmp_path, monkeypatch, code):
    """E01: it was taken for lost there, and given up: nothing kept it on the disk, and it was never in the far tier."""
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.001)
    far, events, failed = MemoryStore(), [], []
    pread = os.pread

    def read(fd, *more):
        if len(failed) < 6 and "model-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            failed.append(fd)
            raise OSError(code, os.strerror(code))
        return pread(fd, *more)

    monkeypatch.setattr(os, "pread", read)
    run = TwoTiers(tmp_path / "near", far)
    with CheckpointManager(run, on_event=events.append) as manager:
        manager.save(state_at(1))
        late = time.monotonic() + 20
        while run.waiting and time.monotonic() < late:  # at its end a run tries only once more
            time.sleep(0.002)
    assert len(failed) == 6
    assert [each.kind for each in events if each.kind == "uploaded"] == ["uploaded"]
    assert all("tried again" in each.detail for each in events if each.kind == "not_uploaded")
    assert trainfold.load(far, like=state_at(0)).trainer.step == 1

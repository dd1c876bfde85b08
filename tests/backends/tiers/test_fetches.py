"""What the far tier has is fetched, or the start is refused: it never goes on from an older checkpoint because of what the disk has lost."""

import errno
import os
import shutil

import pytest
import torch
from kit.backends.runs_cases import state_at

import trainfold
from trainfold import CheckpointManager
from trainfold.backends.stores import os_errors
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers import uploads
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.errors import SaveFailed


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_manifest_of_the_disk_that_cannot_be_read_is_not_passed_over_for_an_older_one(tmp_path, monkeypatch, code):
    """E01: the far tier has that checkpoint whole, and the disk an older one."""
    far, near = MemoryStore(), tmp_path / "near"
    with CheckpointManager(TwoTiers(near, far)) as manager:
        for step in (2, 4):
            manager.save(state_at(step))
    lost = (near / "step-00000004" / "manifest.json").stat().st_ino
    pread = os.pread

    def read(fd, *more):
        if os.fstat(fd).st_ino == lost:
            raise OSError(code, os.strerror(code))
        return pread(fd, *more)

    with monkeypatch.context() as patched:  # until here: a new file may get the number of the old one
        patched.setattr(os, "pread", read)
        patched.setattr(os_errors, "is_own_disk", lambda _: True)
        for _ in range(4):
            with (
                pytest.raises(
                    SaveFailed,
                    match=rf"step-00000004/manifest.json.*{os.strerror(code)}.*lost for good, delete that file",
                ) as refused,
                CheckpointManager(TwoTiers(near, far)) as manager,
            ):
                manager.load(state_at(0))
    assert ("right to read" in refused.value.fix) == (code == errno.EACCES), "what may pass is not to be deleted first"
    assert LocalStore(near).list() == ["run.json", "step-00000002", "step-00000004"]
    (near / "step-00000004" / "manifest.json").unlink()
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(state_at(0)).trainer.step == 4


def test_a_machine_that_is_lost_in_its_first_upload_leaves_the_far_tier_to_the_next_one(tmp_path, monkeypatch):
    """W22: the next start made a run of its own, whose uploads the far tier refused, and a start after that was refused too."""
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_SECS", 0.01)
    far, near = MemoryStore(), tmp_path / "near"
    with monkeypatch.context() as patched:

        def full(name, parts, *, size_bytes):
            raise SaveFailed("far", expected="room", found="none", fix="wait")

        patched.setattr(far, "write", full)
        with pytest.raises(SaveFailed), CheckpointManager(TwoTiers(near, far)) as manager:
            manager.save(state_at(1))
    assert far.list() == ["run.json"]
    shutil.rmtree(near)
    for step in (1, 2):
        live = trainfold.attach(torch.nn.Linear(2, 2))
        with CheckpointManager(TwoTiers(near, far)) as manager:
            manager.restore(live)
            assert live.progress.step == step - 1
            live.advance()
            manager.save(live)
    assert far.list() == ["run.json", "step-00000001", "step-00000002"]

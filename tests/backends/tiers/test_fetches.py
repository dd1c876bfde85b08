"""What the far tier has is fetched, or the start is refused: it never goes on from an older checkpoint because of what the disk has lost."""

import errno
import os
import shutil

import pytest
from kit.backends.runs_cases import state_at

from trainfold import CheckpointManager
from trainfold.backends.stores import os_errors
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
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
                    SaveFailed, match=rf"step-00000004/manifest.json.*{os.strerror(code)}.*delete that directory"
                ),
                CheckpointManager(TwoTiers(near, far)) as manager,
            ):
                manager.load(state_at(0))
    assert LocalStore(near).list() == ["run.json", "step-00000002", "step-00000004"]
    shutil.rmtree(near / "step-00000004")
    with CheckpointManager(TwoTiers(near, far)) as manager:
        assert manager.load(state_at(0)).trainer.step == 4

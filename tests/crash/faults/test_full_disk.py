"""A filesystem that is really full: a save that does not fit is refused, and the earlier checkpoints stay."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

import trainfold
from crash.saves.recovery import staged
from crash.saves.scenarios import digest_of_state, state_at
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import NoSpace, SaveFailed

SIZE_BYTES = 4 << 20


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 4 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root of a Linux machine may mount a filesystem")
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "trainfold-test", str(mounted)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted: {made.stderr}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def fill(place, *, left_bytes):
    """Fill the filesystem except for so many bytes."""
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with (place / "filler").open("wb") as file:
        file.write(bytes(max(0, free - left_bytes)))


def loaded(run):
    """The digest of the state that a resume loads; it may warn that a save did not finish."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a save that did not finish")
        return digest_of_state(trainfold.load(run, like=big(0)))


def big(step):
    """A state of 1.5 MiB: allocated ahead, written past the page cache."""
    return state_at(step).evolve(extra={"ema": torch.full((400_000,), float(step)), "queue": torch.zeros(9)})


def test_what_does_not_fit_is_refused_before_anything_is_written(small):
    """C15: the error has the bytes that are needed and free."""
    trainfold.save(big(1), small / "run")
    before = sorted(small.rglob("*"))
    fill(small, left_bytes=1 << 20)
    with pytest.raises(NoSpace, match="nothing was written"):
        trainfold.save(big(2), small / "run")
    assert sorted(path for path in small.rglob("*") if path.name != "filler") == before
    assert loaded(small / "run") == digest_of_state(big(1))


@pytest.mark.parametrize("left_bytes", [0, 4096, 65536, 600_000])
def test_a_disk_that_fills_up_between_the_look_and_the_write_costs_that_save_alone(small, left_bytes, monkeypatch):
    """C15, C16: another program may take the space meanwhile."""
    trainfold.save(big(1), small / "run")
    fill(small, left_bytes=left_bytes)
    monkeypatch.setattr(LocalStore, "reserve", lambda *_: None)
    with pytest.raises(SaveFailed) as failed:
        trainfold.save(big(2), small / "run")
    assert type(failed.value) is NoSpace
    assert loaded(small / "run") == digest_of_state(big(1))
    assert not list(staged(small / "run"))
    assert not list((small / "run").glob("step-00000002/*"))
    (small / "filler").unlink()
    trainfold.save(big(2), small / "run")
    assert loaded(small / "run") == digest_of_state(big(2))

"""A private filesystem that loses its power: ext4 on a loop device over an image in a temporary folder.

EXT4_IOC_SHUTDOWN stops the filesystem at once, without writing its journal: what had not reached the disk by then never does.
The call stops whatever filesystem it is made on, so `PoweredDisk.cut` first makes sure that this is the one made here.

`write` is the program of the writer: it saves into the run that each line of its input names, until it cannot.
"""

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import attrs

IMAGE_BYTES = 64 << 20
KEPT = 3
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN = _IOR('X', 125, __u32)
_NO_LOG_FLUSH = struct.pack("I", 2)  # EXT4_GOING_FLAGS_NOLOGFLUSH


class NoLoopDevice(Exception):
    """The reason why this machine cannot make such a disk."""


@final
@attrs.frozen
class PoweredDisk:
    """A mounted filesystem.

    Attributes:
        image: the file that it is in.
        device: the loop device over it.
        mounted: where it is mounted.
    """

    image: Path
    device: str
    mounted: Path

    def cut(self) -> None:
        """Stop the filesystem without a warning."""
        self._check_is_ours()
        fd = os.open(self.mounted, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # the call takes this descriptor, so it cannot reach another device that was mounted meanwhile
            assert os.fstat(fd).st_dev == Path(self.device).stat().st_rdev
            fcntl.ioctl(fd, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def boot(self) -> None:
        """Unmount the filesystem and mount it again, which replays the journal."""
        _call("umount", str(self.mounted))
        _call("mount", "-t", "ext4", self.device, str(self.mounted))

    def _check_is_ours(self) -> None:
        """Check that the mount point is a mount of a loop device over our own image, and that nothing else uses this device."""
        device = self.mounted.stat().st_dev
        others = ("/", __file__, Path.cwd(), self.mounted.parent, self.image, sys.executable, "/tmp", "/dev/shm")
        for other in map(Path, others):
            assert not other.exists() or other.stat().st_dev != device, f"{other} is on the same device"
        assert self.mounted.name == "trainfold-power-cut"
        assert os.path.ismount(self.mounted)
        assert device == Path(self.device).stat().st_rdev
        found = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        of_device = [fields for fields in found if fields[2] == f"{os.major(device)}:{os.minor(device)}"]
        assert [fields[4] for fields in of_device] == [str(self.mounted)], "mounted elsewhere too"
        backing = Path("/sys/block", Path(self.device).name, "loop/backing_file").read_text().strip()
        assert Path(backing) == self.image


@contextmanager
def powered_disk() -> Iterator[PoweredDisk]:
    """Make a fresh disk, and remove it afterwards.

    Raises:
        NoLoopDevice: if rights or programs for it are missing.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoLoopDevice("only root of a Linux machine may mount a filesystem")
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=folder, prefix="trainfold-") as above:
        image, mounted = Path(above).resolve() / "image", Path(above).resolve() / "trainfold-power-cut"
        mounted.mkdir()
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        device = _call("losetup", "--find", "--show", str(image)).strip()
        try:
            _call("mount", "-t", "ext4", device, str(mounted))
            try:
                yield PoweredDisk(image, device, mounted)
            finally:
                _call("umount", str(mounted))
        finally:
            _call("losetup", "-d", device)


def _call(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLoopDevice(f"{' '.join(words)}: {error} {getattr(error, 'stderr', '')}") from error


# --- the writer ------------------------------------------------------------------------------------------------------


@final
class Writer:
    """A process that saves until it fails, and prints what it does as lines of JSON: ``[what, step, more]``.

    Args:
        warm: makes the command of a Python that has imported torch.
    """

    def __init__(self, warm: Any) -> None:
        program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from crash.kills.power_cut import write; write()"
        self._process = subprocess.Popen(
            warm.command("-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, how: str, run: Path) -> None:
        """Start to save into a run."""
        assert self._process.stdin
        self._process.stdin.write(f"{json.dumps([how, str(run)])}\n")
        self._process.stdin.flush()

    def next(self) -> tuple[str, int, Any]:
        """The next line that it prints; ``end`` comes last."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the writer has died"
        return tuple(json.loads(line))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def write() -> None:
    """Save into the run that each line of the input names, until it cannot."""
    savers: dict[str, Callable[[Path], Iterator[tuple[str, int, Any]]]] = {
        "sync": partial(_save_on, "sync"),
        "async": partial(_save_on, "async"),
        "torch": _torch_save_on,
    }
    for line in sys.stdin:
        how, run = json.loads(line)
        end: object = "it could"
        try:
            for said in savers[how](Path(run)):
                _say(said)
        except Exception as error:  # noqa: BLE001  # the disk is gone
            end = f"{type(error).__name__}: {error}"
        _say(("end", 0, end))


def _say(said: tuple[str, int, object]) -> None:
    sys.stdout.write(f"{json.dumps(said)}\n")
    sys.stdout.flush()


def _save_on(mode: str, run: Path) -> Iterator[tuple[str, int, Any]]:
    """Save step after step; now and then save one again or rewind the run. The manager keeps the last three and the best.

    Each acknowledgement has the names of the checkpoints that stay; all others may be deleted.
    """
    import trainfold
    from crash.saves.scenarios import digest_of_state, state_at
    from trainfold.backends.runs.best.best_file import save_best
    from trainfold.backends.runs.scan import read_inventory
    from trainfold.core.best.record import make_best_record, updated
    from trainfold.core.format.file_names import directory_of
    from trainfold.core.history.inventory import lineage

    step, store, best = 0, trainfold.LocalStore(run), ""
    with trainfold.CheckpointManager(store, mode=mode, keep_last=KEPT) as manager:
        for count in range(1, 400):
            step += {5: 0, 9: -2}.get(count % 10, 1)
            state = state_at(step, count)
            yield "begin", step, {"digest": digest_of_state(state)}
            manager.save(state)
            manager.drain()
            newest = [entry.name for entry in lineage(read_inventory(store))][:KEPT]
            yield "ack", step, {"digest": digest_of_state(state), "kept": [*newest, best]}
            if count % 10 == 2:  # at a step that no rewind leaves behind
                score = 1000.0 - count
                yield "begin", step, {"best": score}
                save_best(store, updated(make_best_record(metric="loss", direction="min"), {"loss": score}, step=step))
                best = directory_of(step)
                yield "ack", step, {"best": score}


def _torch_save_on(run: Path) -> Iterator[tuple[str, int, Any]]:
    from crash.saves.rivals import RIVALS

    run.mkdir()
    fd = os.open(run.parent, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(fd)  # the rival's directory exists before, and is durable
    os.close(fd)
    for step in range(1, 400):
        yield "begin", step, None
        RIVALS["torch.save, fsync, replace"].save(run, step)
        yield "ack", step, None

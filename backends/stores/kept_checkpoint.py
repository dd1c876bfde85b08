"""`keep_checkpoint`: keeps a checkpoint outside its run at no cost: hard links to its files survive when the run deletes the originals."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from trainfold.core.format.file_names import MANIFEST, RUN_FILE


def keep_checkpoint(checkpoint: Path, into: Path) -> Path | None:
    """Keep a committed checkpoint in another folder of the same filesystem, as a run of its own.

    A committed file is never written to again, so its bytes stay the same under either name.

    Args:
        checkpoint: its directory in the run.
        into: the folder that becomes a run; it may hold other checkpoints of the same run.

    Returns:
        The directory of the kept checkpoint; None if the filesystem has no hard links, or the checkpoint was just deleted.
    """
    into.mkdir(parents=True, exist_ok=True)
    kept, being_made = into / checkpoint.name, into / f".{checkpoint.name}"
    try:
        if not (into / RUN_FILE).exists():
            os.link(checkpoint.parent / RUN_FILE, into / RUN_FILE)
        shutil.rmtree(being_made, ignore_errors=True)
        being_made.mkdir()
        names = sorted(path.name for path in checkpoint.iterdir() if path.is_file() and not path.name.startswith("."))
        for name in [*(name for name in names if name != MANIFEST), MANIFEST]:
            os.link(checkpoint / name, being_made / name)
        shutil.rmtree(kept, ignore_errors=True)
        being_made.rename(kept)
    except OSError:
        with suppress(OSError):
            shutil.rmtree(being_made)
        return None
    return kept

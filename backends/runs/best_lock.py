"""`best_json_lock`: keeps one thread from naming a checkpoint in ``best.json`` while another deletes those not named there.

A manager deletes old checkpoints in its own thread. It holds this lock from reading ``best.json`` to the last deletion, so that no
other thread of this process names one of them meanwhile. The lock of the run keeps other processes' writers out.
"""

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

_lock = threading.RLock()


def best_json_lock() -> AbstractContextManager[Any]:
    """The lock of this process; a forked child has its own.

    Examples:
        >>> with best_json_lock(), best_json_lock():
        ...     pass
    """
    return _lock


def _renew() -> None:
    global _lock  # noqa: PLW0603  # the thread that held it does not exist in the child
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

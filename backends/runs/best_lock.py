"""`best_json_lock`: the lock between who names a checkpoint the best and who deletes what no best names (E02).

A manager deletes old checkpoints in a thread of its own, from a look at the best to the last deletion; meanwhile nobody else in
this process names one. Other processes' writers are kept out by the lock of the run.
"""

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

_lock = threading.RLock()


def best_json_lock() -> AbstractContextManager[Any]:
    """The lock of this process; a forked child has one of its own.

    Examples:
        >>> with best_json_lock(), best_json_lock():
        ...     pass
    """
    return _lock


def _renew() -> None:
    global _lock  # noqa: PLW0603  # whoever held it is not there any more
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

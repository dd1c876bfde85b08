"""`keep_in_children`: a forked child, such as a worker of a loader, never frees the groups of its parent.

To end a group, gloo waits for its threads, and a fork does not take them along: a child whose garbage collector found a dropped group would
wait for ever, or crash.
"""

import ctypes
import os
from typing import Any
from weakref import WeakSet

_ALIVE: "WeakSet[Any]" = WeakSet()


def keep_in_children(owner: object) -> None:
    """Note an object that has groups. A child that is forked while it exists keeps it until it ends.

    That is so even if nothing refers to it any more, as long as the garbage collector of this process has not found it.
    """
    _ALIVE.add(owner)


def _keep() -> None:
    for owner in _ALIVE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))  # a list would be freed when Python ends


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)

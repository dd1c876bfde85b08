"""Who holds a lock: a process, as text for messages, and whether it is gone."""

import os
import re
import socket
from pathlib import Path
from typing import Final

_KILLED: Final = 1 << 8  # SIGKILL, of the pending signals in /proc/PID/status
_EXITING: Final = 0x4  # PF_EXITING, of the flags in /proc/PID/stat


def myself() -> str:
    """This process, such as ``process 12 on node-3``."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def has_ended(holder: str) -> bool:
    """Whether a process on this machine is gone, or on its way: then nothing but time is needed. A process of another machine cannot be seen."""
    named = re.fullmatch(r"process (\d+) on (.+)", holder)
    if named is None or named[2] != socket.gethostname() or not Path("/proc/self/stat").exists():
        return False
    process = Path("/proc", named[1])
    try:
        state, *fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        status = (process / "status").read_text(encoding="utf-8")
    except OSError:
        return True
    pending = "".join(re.findall(r"ShdPnd:\s*(\w+)", status)) or "0"
    return state in "ZX" or bool(int(fields[5]) & _EXITING or int(pending, 16) & _KILLED)

"""Who holds a lock, or writes a journal: a process, as text for messages, and whether it is gone."""

import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_KILLED: Final = 1 << 8  # SIGKILL, of the pending signals in /proc/PID/status
_EXITING: Final = 0x4  # PF_EXITING, of the flags in /proc/PID/stat
_PID: Final = re.compile(r"process (\d{1,9}) on ")
_NAMED: Final = re.compile(rf"{_PID.pattern}(\S.*)")
_CLOCK_SECS: Final = 2.0  # of a start, which is known in hundredths, and of the times of files and objects
_MOST_PIDS: Final = 2**22  # of Linux
_START: Final = 19  # the place of the start in what `_fields` gives


def myself() -> str:
    """This process, such as ``process 12 on node-3``."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def this_machine() -> str:
    """This boot of this machine, and these namespaces of processes and of time, in which starts are counted: host names alone repeat. Another text each time where that is not known."""
    return _machine() or uuid.uuid4().hex


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes, times = Path("/proc/self/ns/pid").stat().st_ino, Path("/proc/self/ns/time")
        return (
            f"{boot}:{processes}:{times.stat().st_ino if times.exists() else ''}"  # Linux has those of time since 5.6
        )
    except OSError:
        return ""


def seen_as() -> dict[str, Any]:
    """This process, as JSON from which `still_runs` knows it."""
    return {"pid": os.getpid(), "began": start_of(os.getpid()), "machine": this_machine()}


def still_runs(process: Mapping[str, Any]) -> bool | None:
    """Whether a process runs; None if it cannot be seen from here.

    Args:
        process: as `seen_as` has it; from a file, so anything.

    Examples:
        >>> still_runs(seen_as()), still_runs({"pid": 1, "began": "", "machine": this_machine()}), still_runs({})
        (True, None, None)
    """
    pid, began = process.get("pid"), process.get("began")
    if not (isinstance(pid, int) and isinstance(began, str) and began and process.get("machine") == this_machine()):
        return None
    is_gone = is_dead(pid, began) if 0 < pid < _MOST_PIDS else True
    return None if is_gone is None else not is_gone


def pid_of(holder: str) -> int:
    """The number in a text that begins as `myself`; 0 if it has none."""
    named = _PID.match(holder)
    return 0 if named is None else int(named[1])


def seen_from_here(holder: str, machine: str) -> str:
    """A holder, named apart from this machine's own processes if it has the name of this host and is not one of them: it cannot be seen.

    Args:
        holder: as `myself` names it.
        machine: its `this_machine`; "" if that is not known.

    Examples:
        >>> seen_from_here(myself(), this_machine()) == seen_from_here(myself(), "") == myself()
        True
        >>> seen_from_here(myself(), "another").removeprefix(myself())
        ' (in another container, or before a restart)'
    """
    here = _machine()
    is_elsewhere = "" not in {machine, here} and machine != here and holder.endswith(f" on {socket.gethostname()}")
    return f"{holder} (in another container, or before a restart)" if is_elsewhere else holder


def has_ended(holder: str) -> bool:
    """Whether a process on this machine is gone, or on its way: then nothing but time is needed. A process of another machine cannot be seen."""
    named = _NAMED.fullmatch(holder)
    return named is not None and named[2] == socket.gethostname() and is_dead(int(named[1])) is True


def has_gone_since(holder: str, at: float) -> bool | None:
    """Whether a process that had a lock at a moment is gone; None if it cannot be seen, as on another machine. A text that names none is one that is gone."""
    named = _NAMED.fullmatch(holder)
    if named is None:
        return True
    if named[2] != socket.gethostname():
        return None
    return is_dead(int(named[1])) if was_there(int(named[1]), at) else True


def writer_in_words(holder: str, *, is_gone: bool | None, is_fresh: bool) -> str | None:
    """A process that may be writing, for a message; None if it is gone, or cannot be seen and has given no sign for long.

    Args:
        holder: as `myself` names it.
        is_gone: whether it is gone; None if that cannot be seen.
        is_fresh: whether there is a new sign of it.

    Examples:
        >>> writer_in_words("process 12 on node-3", is_gone=None, is_fresh=True)
        'process 12 on node-3, if that still runs'
    """
    if is_gone or (is_gone is None and not is_fresh):
        return None
    return holder if is_gone is False else f"{holder}, if that still runs"


def was_there(pid: int, at: float) -> bool:
    """Whether the process of this number had begun at a moment, in seconds since 1970: numbers are used again. True if that cannot be seen."""
    started = start_of(pid)
    if not started:
        return True
    age_secs = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_secs <= at + _CLOCK_SECS


def is_dead(pid: int, started: str = "") -> bool | None:
    """Whether the process of this number is gone, or on its way; None if that cannot be seen.

    Args:
        pid: the number, above 0, among the processes of this namespace.
        started: what `start_of` said of it; "" if that is not known. Numbers are used again, so another start is another process.
    """
    if not _is_seen_here():
        return None
    try:
        fields = _fields(pid)
        status = Path("/proc", str(pid), "status").read_text(encoding="utf-8")
    except OSError:
        return None if _exists(pid) else True  # a machine may hide the processes of other users (hidepid)
    pending = "".join(re.findall(r"ShdPnd:\s*(\w+)", status)) or "0"
    is_another = bool(started) and fields[_START] != started
    return is_another or fields[0] in "ZX" or bool(int(fields[6]) & _EXITING or int(pending, 16) & _KILLED)


def start_of(pid: int) -> str:
    """When a process started, in ticks since the boot; "" if that cannot be seen."""
    try:
        return _fields(pid)[_START] if _is_seen_here() else ""
    except OSError:
        return ""


def _is_seen_here() -> bool:
    """Whether /proc shows the namespace of this process: that of another one has the same numbers for other processes."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True


def _fields(pid: int) -> list[str]:
    """What /proc/PID/stat says from the state on."""
    return Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()

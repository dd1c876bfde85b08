"""Forks of a test's process, which train and are killed."""

import os
import signal
import sys
import traceback


def started(function, *arguments, **named):
    """The id of a process of its own, which calls a function and ends."""
    child = os.fork()
    if child == 0:
        try:
            function(*arguments, **named)
        except BaseException:  # noqa: BLE001 - a fork of the tests may not return into them
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child):
    """Its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(function, *arguments, **named):
    """The exit code of a process of its own, negative for a signal."""
    return ended(started(function, *arguments, **named))


def kill_at_rename(number):
    """Kill this process before so many files of saves get their final names."""
    left = iter(range(number))

    def hook(event, _):
        if event == "os.rename" and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)

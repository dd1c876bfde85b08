"""Programs that start in milliseconds: a server that has torch imported forks a process for each, and ends with its pytest.

``python warm_python.py serve SOCKET`` is the server. ``python -S warm_python.py run SOCKET ... PROGRAM ...`` is a stand-in for
``python PROGRAM ...``: it has the program's output and exit code, passes on requests to stop, and takes the program along when it is killed.
"""

import marshal
import os
import sys


class WarmPython:
    """The server, from the tests' side; the first command starts it."""

    def __init__(self, folder):
        self._socket = folder / "warm"
        self._server = None

    def command(self, *words, is_tidy=False):
        """The command that replaces ``python words``, where the words are a program, ``-c CODE`` or ``-m MODULE``, and arguments.

        Args:
            words: the words after ``python``.
            is_tidy: let Python and torch shut down in order at the end, which takes longer than most of the programs.
        """
        if self._server is None:
            import subprocess
            import time

            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, __file__, "serve", str(self._socket)], stdin=subprocess.PIPE, env=environment
            )
            while not self._socket.exists():
                assert self._server.poll() is None, "the server of warm programs has ended"
                time.sleep(0.02)
        end = "tidy" if is_tidy else "fast"
        return [sys.executable, "-S", "-E", __file__, "run", str(self._socket), end, *map(str, words)]

    def torchrun(self, options, *words):
        """The command that replaces ``torchrun options words``: torchrun itself and its workers are warm."""
        return self.command("-m", "torch.distributed.run", *options, "--no-python", *self.command(*words))

    def close(self):
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait(timeout=30)


def run(path, end, words):
    """The stand-in; it imports next to nothing, because there are hundreds of them."""
    import _signal
    import _socket

    server = _socket.socket(_socket.AF_UNIX)
    server.connect(path)
    request = marshal.dumps((words, os.getcwd(), dict(os.environ), end == "tidy"))  # noqa: PTH109
    streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
    server.sendmsg([len(request).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    while request:
        request = request[server.send(request) :]
    pid = int.from_bytes(server.recv(4), "big")
    for number in (_signal.SIGTERM, _signal.SIGINT):
        _signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int.from_bytes(server.recv(4), "big", signed=True)
    if code < 0:
        _signal.signal(-code, _signal.SIG_DFL) if code != -_signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(path):
    import contextlib
    import gc
    import select
    import socket

    import numpy as np  # noqa: F401
    import torch
    import torch.distributed.run
    import torch.utils.data
    from kit.huge_pages import use_huge_pages

    import trainfold

    trainfold.attach, trainfold.CheckpointManager  # noqa: B018  # so that they are imported
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()  # imports everything that torch imports at the first step
    gc.collect()
    gc.freeze()
    use_huge_pages()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}-new")
        listener.listen(16)
        os.rename(f"{path}-new", path)  # noqa: PTH104
        running = {}
        while True:
            ready = select.select([listener, sys.stdin, *running], [], [], 0.01 if running else None)[0]
            if sys.stdin in ready:
                for pid in running.values():
                    kill(pid)
                return
            for connection in ready:
                if connection is listener:
                    accepted, _ = listener.accept()
                    running[accepted] = start(accepted, [listener, *running])
                    with contextlib.suppress(OSError):
                        accepted.sendall(running[accepted].to_bytes(4, "big"))
                elif not connection.recv(1):  # the process that waits for it was killed
                    kill(running[connection])
            for connection, pid in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    kill(pid)  # the program's loader workers
                    with contextlib.suppress(OSError):
                        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
                    connection.close()
                    del running[connection]


def kill(pid):
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def start(connection, others):
    import array
    import contextlib
    import socket

    head, ancillary, *_ = connection.recvmsg(4, socket.CMSG_SPACE(12))
    fds = array.array("i", ancillary[0][2])
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += connection.recv(65536)
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        return pid
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    for other in (connection, *others):
        other.close()
    for stream, fd in enumerate(fds):
        os.dup2(fd, stream)
        os.close(fd)
    *program, is_tidy = marshal.loads(request)
    code = be(*program)
    if is_tidy:
        sys.exit(code)
    os._exit(code)


def be(words, folder, environment):
    import random
    import runpy
    import traceback
    import types
    from pathlib import Path

    import numpy as np

    random.seed()  # as in a Python that has just started
    np.random.seed()  # noqa: NPY002
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    first, *rest = words
    code = 0
    try:
        if first == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        elif first == "-m":
            sys.argv, sys.path[0] = rest, folder
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(first).parent)
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    run(sys.argv[2], sys.argv[3], sys.argv[4:]) if sys.argv[1] == "run" else serve(sys.argv[2])

"""Programs that start in milliseconds: a server that has torch imported forks a process for each, and ends with its pytest.

``python warm_python.py serve SOCKET`` is the server. ``python -S warm_python.py run SOCKET PROGRAM ...`` is a stand-in for
``python PROGRAM ...``: it has the program's output and exit code, and takes it along when it is killed.
"""

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


class WarmPython:
    """The server, from the tests' side; the first command starts it."""

    def __init__(self, folder):
        self._socket = folder / "warm"
        self._server = None

    def command(self, program, *arguments):
        """The command that replaces ``python program arguments``."""
        if self._server is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, __file__, "serve", str(self._socket)], stdin=subprocess.PIPE, env=environment
            )
            while not self._socket.exists():
                assert self._server.poll() is None, "the server of warm programs has ended"
                time.sleep(0.02)
        return [sys.executable, "-S", "-E", __file__, "run", str(self._socket), str(program), *map(str, arguments)]

    def close(self):
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait(timeout=30)


def run(path, words):
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps({"words": words, "cwd": str(Path.cwd()), "env": dict(os.environ)}).encode()
        server.sendmsg(
            [len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))]
        )
        server.sendall(request)
        code = int.from_bytes(server.recv(4), "big", signed=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(path):
    import gc

    import numpy as np  # noqa: F401
    import torch
    import torch.utils.data

    import trainfold

    trainfold.attach, trainfold.CheckpointManager  # noqa: B018  # so that they are imported
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()  # imports everything that torch imports at the first step
    gc.collect()
    gc.freeze()
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
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def start(connection, others):
    head, ancillary, *_ = connection.recvmsg(4, socket.CMSG_SPACE(8))
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
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    os._exit(be(json.loads(request)))


def be(request):
    import random
    import runpy
    import traceback

    import numpy as np

    random.seed()  # as in a Python that has just started
    np.random.seed()  # noqa: NPY002
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["words"]
    sys.path[0] = str(Path(request["words"][0]).parent)
    code = 0
    try:
        runpy.run_path(request["words"][0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    run(sys.argv[2], sys.argv[3:]) if sys.argv[1] == "run" else serve(sys.argv[2])

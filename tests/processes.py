"""Worlds of real processes over gloo, for tests: a server imports torch once, and each rank is a fork of it.

Run as a program, this file is that server. It reads requests, one JSON line each, from its standard input, and ends with it; no rank
outlives its request.
"""

import gc
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
from kit.huge_pages import use_huge_pages

TIMEOUT_SECS = 120.0

# What a rank would import for seconds, some of it at the first call of a DTensor.
WARM = (
    "hypothesis", "pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "trainfold.adapters.live.attach", "trainfold.adapters.manager.manager", "trainfold.backends.ranks.torch_distributed",
)  # fmt: skip


@attrs.frozen
class Ended:
    """How a rank has ended.

    Attributes:
        rank: the rank.
        code: its exit code; negative for the signal that killed it.
        value: what its function returned, if it did.
        error: the name of what it raised, or None.
        text: the text of that error.
        cause: the text of the error that it was raised from.
        printed: its standard output and error.
        secs: the time from its start to its end.
    """

    rank: int
    code: int
    value: Any
    error: str | None
    text: str
    cause: str
    printed: str
    secs: float


class Processes:
    """The server, from the tests' side; the first world starts it.

    Args:
        warm: makes the command of a Python that has imported torch; see warm_python.py.
    """

    def __init__(self, warm: Any) -> None:
        self._warm = warm
        self._server: subprocess.Popen[str] | None = None

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Return what a function returns on each rank; no rank may fail. The arguments are those of `outcomes`."""
        ended = self.outcomes(world_size, function, *arguments, **options)
        for rank in ended:
            assert rank.code == 0, f"rank {rank.rank} ended with {rank.code}: {rank.error} {rank.text}\n{rank.printed}"
        return [rank.value for rank in ended]

    def outcomes(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        collectives: dict[str, Any] | None = None,
        store: str = "file",
        is_tidy: bool = False,
        warm: Sequence[str] = (),
        timeout_secs: float = TIMEOUT_SECS,
    ) -> list[Ended]:
        """Run a function on each rank and return how each rank ends.

        Args:
            world_size: number of processes.
            function: a function of a module; it is called with this rank's `TorchCollectives` and the arguments.
            arguments: JSON values.
            collectives: arguments of `TorchCollectives`, of a tree those of `rank_tree`; without them, the function is called without collectives.
            store: how the ranks meet: "file", or "tcp" (rank 0 is the host).
            is_tidy: let Python and torch shut down in order at the end, as in a script.
            warm: modules that the ranks would import themselves for seconds; they are there once for all of them.
            timeout_secs: after this time all ranks are killed, and the test fails.
        """
        module = inspect.getmodule(function)
        is_ours = module is not None and module.__name__.startswith("trainfold.")
        with tempfile.TemporaryDirectory(prefix="world-") as folder:
            request = {
                "world_size": world_size,
                "module": module.__name__ if is_ours and module else "",
                "file": inspect.getfile(function),
                "function": function.__qualname__,
                "arguments": arguments,
                "collectives": collectives,
                "store": store,
                "is_tidy": is_tidy,
                "warm": list(warm),
                "timeout_secs": timeout_secs,
                "folder": folder,
            }
            codes, secs = self._ask(request)
            ended = [_ended(Path(folder), rank, code, secs[rank]) for rank, code in enumerate(codes)]
        late = [rank for rank in ended if rank.code == -signal.SIGALRM]
        assert not late, f"still running after {timeout_secs} s:\n" + "\n".join(rank.printed for rank in ended)
        return ended

    def close(self) -> None:
        """End the server."""
        if self._server is not None and self._server.stdin and self._server.stdout:
            self._server.stdin.write(
                "\n"
            )  # the end of the pipe is not enough: a fork of this process may hold it open, such as a loader's worker
            self._server.stdin.close()
            self._server.wait(timeout=30)
            self._server.stdout.close()

    def _ask(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        if self._server is None:
            command = self._warm.command(__file__, is_tidy=True)  # for the ranks that end so
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server of processes has ended"
        return tuple(json.loads(line))


def _ended(folder: Path, rank: int, code: int, secs: float) -> Ended:
    from trainfold.backends.ranks.wire import from_wire

    told = folder / f"told-{rank}"
    value, error, text, cause = from_wire(told.read_bytes()) if told.exists() else (None, None, "", "")
    return Ended(
        rank, code, value, error, text, cause, (folder / f"log-{rank}").read_text(errors="replace"), round(secs, 2)
    )


# --- the server ------------------------------------------------------------------------------------------------------


def serve() -> None:
    for name in WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    use_huge_pages()
    for line in sys.stdin:
        if line == "\n":
            break
        request = json.loads(line)
        for name in request["warm"]:
            importlib.import_module(name)
        module_of(request)  # with all that it imports, once for all ranks
        sys.stdout.write(json.dumps(run_world(request)) + "\n")
        sys.stdout.flush()


def run_world(request: dict[str, Any]) -> tuple[list[int], list[float]]:
    start = time.monotonic()
    ranks = {start_rank(request, rank): rank for rank in range(request["world_size"])}
    codes, secs = [0] * len(ranks), [0.0] * len(ranks)
    try:
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                secs[ranks[pid]] = time.monotonic() - start
                codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - start > request["timeout_secs"]:
                for late in ranks:
                    os.kill(late, signal.SIGALRM)  # nothing else sends this signal, so it means "too late"
                request["timeout_secs"] += 5.0
            else:
                gone = select.select([sys.stdin], [], [], 0.01)[0] and os.getppid() == 1
                if gone:
                    raise KeyboardInterrupt
    finally:
        for left in ranks:
            os.kill(left, signal.SIGKILL)
    return codes, secs


def start_rank(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    folder = Path(request["folder"])
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = be_rank(request, rank, folder)
    if request["is_tidy"]:
        sys.exit(code)
    sys.stdout.flush()
    os._exit(code)  # an orderly exit of a Python with torch takes longer than most of the tests


def be_rank(request: dict[str, Any], rank: int, folder: Path) -> int:
    from trainfold.backends.ranks.wire import to_wire

    told, code = (None, None, "", ""), 0
    try:
        told = (work(request, rank, folder), None, "", "")
    except BaseException as error:  # noqa: BLE001  # the test judges it
        traceback.print_exc()
        told, code = (None, type(error).__name__, str(error), str(error.__cause__ or "")), 1
    (folder / f"telling-{rank}").write_bytes(to_wire(told))
    (folder / f"telling-{rank}").rename(folder / f"told-{rank}")
    return code


def work(request: dict[str, Any], rank: int, folder: Path) -> Any:
    import torch.distributed as dist

    from trainfold.backends.ranks.torch_distributed import TorchCollectives
    from trainfold.core.layout.agreement.rank_tree import rank_tree

    store = store_of(request, rank, folder)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=request["world_size"], timeout=timedelta(seconds=60)
    )
    store.set(f"connected-{rank}", "")  # a rank that ends at once would be missed by those that still connect to it
    store.wait([f"connected-{each}" for each in range(request["world_size"])], timedelta(seconds=60))
    function: Any = module_of(request)
    for part in request["function"].split("."):
        function = getattr(function, part)
    if request["collectives"] is None:
        return function(*request["arguments"])
    options = dict(request["collectives"])
    if isinstance(options.get("topology"), dict):
        options["topology"] = rank_tree(request["world_size"], **options["topology"])
    return function(TorchCollectives(**options), *request["arguments"])


def store_of(request: dict[str, Any], rank: int, folder: Path) -> Any:
    import torch.distributed as dist

    if request["store"] == "file":
        return dist.FileStore(str(folder / "store"), request["world_size"])
    port_file, wait = folder / "port", timedelta(seconds=30)
    if rank == 0:
        store = dist.TCPStore(
            "localhost", 0, request["world_size"], is_master=True, timeout=wait, wait_for_workers=False
        )
        (folder / "port-").write_text(str(store.port))
        (folder / "port-").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.01)
    return dist.TCPStore("localhost", int(port_file.read_text()), request["world_size"], timeout=wait)


def module_of(request: dict[str, Any]) -> Any:
    if request["module"]:
        return importlib.import_module(request["module"])
    name = f"of_rank_{Path(request['file']).stem}"
    if getattr(sys.modules.get(name), "__file__", None) == request["file"]:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, request["file"])
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve()

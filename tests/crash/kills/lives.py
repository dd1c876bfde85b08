"""A training program that is killed: a server imports torch once, and each life of the program is a fork of it that SIGKILL ends.

Run as a program, this file is that server. It reads one `Life` a line from its standard input, and says how each ended.
"""

import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Final, final

import attrs
import numpy as np
import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.best.best_file import load_best, save_best
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.core.best.record import BestRecord, make_best_record, updated
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.history.inventory import lineage
from trainfold.core.save.events import Event
from trainfold.core.state.state import TrainState

STEPS: Final = 30
EVERY: Final = 3
EVALUATE_EVERY: Final = 4
WANTED: Final = make_best_record(metric="loss", direction="min")
_WATCHED_SECS: Final = 0.1
_WIDTH: Final = 160  # half a megabyte of state: a save takes longer than a step


@final
@attrs.frozen
class Kill:
    """When a life ends.

    Attributes:
        after: the first word of the line after which it ends, such as ``saved``.
        count: after how many such lines.
        is_watched: whether to wait then until a file that is being written appears in the run.
        delay_secs: how long to wait after that.
    """

    after: str
    count: int = 1
    is_watched: bool = False
    delay_secs: float = 0.0


@final
@attrs.frozen
class Life:
    """One process of the program.

    Attributes:
        run: the run's directory.
        mode: the mode of its manager.
        begins: ``on``: continue from the newest checkpoint; ``again``: save that one again first; ``rewind``: go back to the one before it.
        kill: when it is killed; None to let it finish.
        tells_states: whether it prints the fingerprint of each step.
    """

    run: str
    mode: str
    begins: str = "on"
    kill: Kill | None = None
    tells_states: bool = False


@final
class Lives:
    """The server, from the tests' side.

    Args:
        warm: makes the command of a Python that has imported torch.
    """

    def __init__(self, warm: Any) -> None:
        self._server = subprocess.Popen(
            warm.command(__file__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def live(self, life: Life) -> tuple[int, list[str]]:
        """Run a life; return how it ended, and the lines that it had printed by then."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(attrs.asdict(life)) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        assert line, "the server has ended"
        code, printed = json.loads(line)
        return code, printed

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()


# --- the program -----------------------------------------------------------------------------------------------------


@final
class Job:
    """A small mutable run: dropout draws random numbers, batch norm has buffers, the data are random, and a list is plain Python."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.Dropout(0.1), nn.Linear(_WIDTH, _WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7)
        self.seen: list[float] = []
        self.live: Live = attach(
            self.model, self.optimizer, scheduler=self.scheduler, extra={"seen": (lambda: self.seen, self._take)}
        )

    def _take(self, seen: list[float]) -> None:
        self.seen = seen

    def train(self) -> None:
        x = torch.randn(8, 8)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.seen.append(loss.item())
        self.live.advance(samples=8)


def score_at(step: int) -> float:
    """The score of an evaluation at that step."""
    return random.Random(step).random() - 0.01 * step


def best_of_all() -> tuple[int, float]:
    """The best step and score of a run that was never killed."""
    score, step = min((score_at(step), step) for step in range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY))
    return step, score


def digest(state: TrainState) -> str:
    """All fingerprints of a state, in one line."""
    return json.dumps(fingerprint(state), sort_keys=True)


def say(*words: Any) -> None:
    """Print a line and flush it before returning."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def program(life: Life) -> None:
    """Train to the end, from the run's current position."""
    warnings.simplefilter("ignore")
    random.seed(0)  # Python reseeds in a fork
    np.random.seed(0)  # noqa: NPY002 (the stream that a checkpoint has)
    store, job = LocalStore(life.run), Job()
    say("ready")
    with CheckpointManager(
        store, every=EVERY, keep_last=2, mode=life.mode, on_event=lambda event: say(*_words_of(event))
    ) as manager:
        say("litter", len(list(litter(life.run))))
        best = _begin(job.live, manager, store, life)
        while True:
            step = job.live.progress.step
            if step > 0:
                best = _boundary(job.live, manager, store, best)
            if life.tells_states:
                say("state", step, digest(job.live.capture()))
            if step == STEPS:
                break
            job.train()
        manager.finish(job.live)
    say("done", digest(job.live.capture()))


def _begin(live: Live, manager: CheckpointManager, store: LocalStore, life: Life) -> BestRecord:
    steps = [entry.head.step for entry in lineage(read_inventory(store)) if entry.head]
    older = steps[1] if life.begins == "rewind" and len(steps) > 1 else None
    manager.restore(live, step=older)
    step = live.progress.step
    say("began", step)
    if life.begins == "again" and step:
        say("at", step)
        manager.save(live)
    best = load_best(store, WANTED)
    return WANTED if best.step is not None and best.step > step else best  # a rewind past the best clears it (E12)


def _boundary(live: Live, manager: CheckpointManager, store: LocalStore, best: BestRecord) -> BestRecord:
    step, new = live.progress.step, best
    if step % EVALUATE_EVERY == 0:
        new = updated(best, {"loss": score_at(step)}, step=step)
    say("at", step)
    manager.step(live, is_best=new is not best)
    if new is not best:
        manager.drain()
        say("best?", step)
        save_best(store, new)
        say("best", step)
    return new


def _words_of(event: Event) -> tuple[Any, ...]:
    return (event.kind, event.checkpoint if event.step is None else event.step)


def litter(run: str) -> Iterator[str]:
    """The files that an unfinished save has left and that no reader uses."""
    for above, _, names in os.walk(run):
        yield from (f"{above}/{name}" for name in names if name.startswith(".") and name != ".lock")


# --- the server ------------------------------------------------------------------------------------------------------


def serve() -> None:
    Job().train()  # the first step imports many modules
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        kill = asked.pop("kill")
        life = Life(**asked, kill=None if kill is None else Kill(**kill))
        sys.stdout.write(json.dumps(_lived(life)) + "\n")
        sys.stdout.flush()


def _lived(life: Life) -> tuple[int, list[str]]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be(life, reading, writing)
    os.close(writing)
    killer, data = _killer(life, pid), b""
    next(killer)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], 60.0)[0] and (more := pipe.read(65536)):
            data += more
            killer.send(data)
    killer.close()
    os.kill(pid, signal.SIGKILL)  # without effect, unless the life was silent for a minute
    _, status = os.waitpid(pid, 0)
    *lines, _ = data.decode().split("\n")
    return os.waitstatus_to_exitcode(status), lines


def _be(life: Life, reading: int, writing: int) -> None:
    code = 1
    try:
        os.close(reading)
        os.dup2(writing, 1)
        os.close(writing)
        program(life)
        code = 0
    except BaseException as error:  # noqa: BLE001  # the test judges it
        say("error", type(error).__name__, " ".join(str(error).split()))
    finally:
        os._exit(code)


def _killer(life: Life, pid: int) -> Iterator[None]:
    """Receives all output so far, and kills at the right time."""
    if life.kill is not None:
        word, data = f"{life.kill.after} ".encode(), b""
        while sum(line.startswith(word) for line in data.split(b"\n")) < life.kill.count:
            data = yield
        start = time.monotonic()
        while life.kill.is_watched and time.monotonic() - start < _WATCHED_SECS and not any(litter(life.run)):
            pass
        time.sleep(life.kill.delay_secs)
        os.kill(pid, signal.SIGKILL)  # no one has waited for this child, so no other process can have its id
    while True:
        yield


if __name__ == "__main__":
    serve()

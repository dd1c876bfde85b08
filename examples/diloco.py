"""DiLoCo with three workers and a server; a worker and the server are killed on the way. Beside it, plain data parallel on as many tokens.

Run it with ``python examples/diloco.py runs/diloco``; some minutes later ``runs/diloco/diloco.png`` has the losses and the bytes that were sent.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trainfold
from trainfold.adapters.cli.demo.corpus import as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.model import GPT
from trainfold.construct import materialize, on_meta
from trainfold.diloco import DilocoServer, DilocoWorker, outer_state

WORKERS, BATCH, STEPS = 3, 16, 25  # windows of a step of a worker; its steps between two exchanges
CORPUS = make_corpus(help_text(), context=64, heldout_bytes=20_000)
CURSOR = trainfold.data.make_cursor(len(CORPUS.train), seed=0)


def build() -> nn.Module:
    """Return the model; the server's has the first weights, a worker's takes no memory for its own."""
    return GPT(layers=2, width=96, heads=4, context=64, dropout=0.0)


class Inner:
    """The inner optimizer, with a schedule that needs no end: a warm-up and then a plateau (WSD without its decay)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        plateau = trainfold.schedules.wsd(warmup_steps=50, decay_steps=0, decay="none")
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, plateau)

    def step(self, windows: torch.Tensor) -> None:
        """Train on a batch."""
        loss: Any = loss_of(self.model, windows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return nats per byte."""
    batch = as_batch(windows)
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def windows_at(start: int, count: int) -> torch.Tensor:
    """Return training windows by their position, counted over all epochs: each epoch has its own order."""
    return CORPUS.train[torch.from_numpy(CURSOR.advance(start).batch_across(count))]


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Return nats per byte of text that is not trained on."""
    return loss_of(model, CORPUS.heldout).item()


def record(run: Path, **entry: Any) -> None:
    """Append a line to the record of the run."""
    with (run / "record.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def serve(run: Path, port: int, samples: int) -> None:
    """Be the server: from the newest checkpoint to the end."""
    torch.manual_seed(0)
    model = build()
    state = outer_state(model)
    with trainfold.CheckpointManager(run / "server", every=1, keep_last=2) as manager:
        if manager.should_load(state):
            state = manager.load(state)
        unit = STEPS * BATCH
        with DilocoServer(
            state, token=os.environ["TOKEN"], unit_samples=unit, total_samples=samples, port=port
        ) as server:
            print(server.port, flush=True)
            for state in server.rounds():
                manager.step(state)  # durable before a worker sees it
                assert state.model is not None and state.trainer is not None  # noqa: PT018
                model.load_state_dict(state.model.params, strict=False)
                record(run, who="diloco", samples=state.trainer.samples, loss=held_out(model))
                print("round", state.trainer.step, flush=True)


def work(run: Path, port: int, name: str) -> None:
    """Be a worker: its optimizer comes from its own checkpoint, its weights and its data from the server."""
    model = on_meta(build)
    inner = Inner(model)
    materialize(model, "cpu")
    worker = DilocoWorker("127.0.0.1", port, token=os.environ["TOKEN"])
    live = trainfold.attach(model, inner.optimizer, scheduler=inner.scheduler, weights=worker)
    with trainfold.CheckpointManager(run / name, every=STEPS, keep_last=2) as manager:
        manager.restore(live)
        for unit in worker.units(live):
            for start in range(unit.start, unit.stop, BATCH):
                windows = windows_at(start, min(BATCH, unit.stop - start))
                inner.step(windows)
                live.advance(samples=len(windows))
            manager.step(live)
            record(
                run, who="worker", pid=os.getpid(), samples=unit.stop, sent=worker.sent_bytes + worker.received_bytes
            )


def data_parallel(run: Path, samples: int) -> None:
    """Train with the batches of three workers that sum their gradients in each step, computed in one process."""
    torch.manual_seed(0)
    model = build()
    inner = Inner(model)
    size = sum(each.numel() for each in model.parameters()) * 4
    for step in range(1, samples // (WORKERS * BATCH) + 1):
        inner.step(windows_at((step - 1) * WORKERS * BATCH, WORKERS * BATCH))
        if step % STEPS == 0:
            sent = 2 * (WORKERS - 1) * size * step  # by the three together, in a ring
            record(run, who="data parallel", samples=step * WORKERS * BATCH, loss=held_out(model), sent=sent)


def draw(run: Path) -> None:
    """Draw the losses, and the bytes that all workers and the server have sent."""
    import matplotlib.pyplot as plt

    entries = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    figure, (losses, network) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for who in ("data parallel", "diloco"):
        mine = [each for each in entries if each["who"] == who]
        tokens = [each["samples"] * 64 for each in mine]
        losses.plot(tokens, [each["loss"] for each in mine], label=who)
        if who == "data parallel":
            network.plot(tokens, [each["sent"] / 1e6 for each in mine])
    sent: dict[int, int] = {}  # by process
    points = []
    for each in sorted((each for each in entries if each["who"] == "worker"), key=lambda each: each["samples"]):
        sent[each["pid"]] = max(each["sent"], sent.get(each["pid"], 0))
        points.append((each["samples"] * 64, sum(sent.values()) / 1e6))
    network.plot(*zip(*points, strict=True))
    losses.set(xlabel="tokens", ylabel="held-out loss, nats per byte", title="loss")
    network.set(xlabel="tokens", ylabel="MB, all workers together", yscale="log", title="sent over the network")
    losses.legend()
    figure.savefig(run / "diloco.png", dpi=110)


def main(run: Path, samples: int) -> None:
    """Start all, kill two, train the other way, and draw."""
    run.mkdir(parents=True)
    environment = {**os.environ, "TOKEN": secrets.token_urlsafe(), "OMP_NUM_THREADS": "1"}

    def start(*arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, __file__, str(run), *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def read_until(server: "subprocess.Popen[str]", number: int) -> None:
        assert server.stdout is not None
        while (line := server.stdout.readline()) and line != f"round {number}\n":
            pass

    server = start("serve", 0, samples)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    workers = {name: start("work", port, name) for name in ("worker-0", "worker-1", "worker-2")}
    read_until(server, 4)
    workers["worker-1"].kill()
    read_until(server, 8)
    workers["worker-1"] = start("work", port, "worker-1")
    read_until(server, 12)
    server.kill()
    server = start("serve", port, samples)
    assert [each.wait() for each in (server, *workers.values())] == [0, 0, 0, 0]
    data_parallel(run, samples)
    draw(run)


if __name__ == "__main__":
    folder, role, *rest = Path(sys.argv[1]), *(sys.argv[2:] or ["main", "36000"])
    if role == "serve":
        serve(folder, int(rest[0]), int(rest[1]))
    elif role == "work":
        work(folder, int(rest[0]), rest[1])
    else:
        main(folder, int(rest[0]))

"""DiLoCo with three workers and a server; a worker and the server are killed on the way. Beside it, plain data parallel on as many tokens.

Run it with ``python examples/diloco.py runs/diloco``; some minutes later ``runs/diloco/diloco.png`` has the losses and the bytes that were sent.
"""

import itertools
import multiprocessing
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, functional

import trainfold
from trainfold.adapters.cli.demo.corpus import as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.model import GPT
from trainfold.construct import materialize, on_meta
from trainfold.diloco import DilocoServer, DilocoWorker, outer_state

WORKERS, CONTEXT = 3, 64  # bytes of a window
BATCH, STEPS = 16, 25  # windows of a step of a worker; its steps between two exchanges
CORPUS = make_corpus(help_text(), context=CONTEXT, heldout_bytes=20_000)
CURSOR = trainfold.data.make_cursor(len(CORPUS.train), seed=0)


def build() -> Module:
    """Return the model; the server's has the first weights, a worker's takes no memory for its own."""
    return GPT(layers=2, width=96, heads=4, context=CONTEXT, dropout=0.0)


def inner(model: Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the inner optimizer, with a schedule that needs no end: a warm-up and then a plateau (WSD without its decay)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    plateau = trainfold.schedules.wsd(warmup_steps=50, decay_steps=0, decay="none")
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, plateau)


def loss_of(model: Module, windows: torch.Tensor) -> Any:
    """Return nats per byte."""
    batch = as_batch(windows)
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def train(model: Module, optimizer: Any, scheduler: Any, start: int, count: int) -> None:
    """Train on windows by their position, counted over all epochs: each epoch has its own order."""
    loss_of(model, CORPUS.train[torch.from_numpy(CURSOR.advance(start).batch_across(count))]).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def record(run: Path, series: str, samples: int, value: float) -> None:
    """Append a point to a series."""
    with (run / f"{series}.txt").open("a") as file:
        file.write(f"{samples * CONTEXT} {value}\n")


def points_of(run: Path, series: str) -> list[list[float]]:
    """Return the points of a series by their tokens."""
    lines = (run / f"{series}.txt").read_text().splitlines()
    return sorted([float(number) for number in line.split()] for line in lines)


def serve(run: Path, port: int, token: str, samples: int) -> None:
    """Be the server: from the newest checkpoint to the end."""
    torch.manual_seed(0)
    model = build()
    state = outer_state(model)
    with trainfold.CheckpointManager(run / "server", every=1, keep_last=2) as manager:
        if manager.should_load(state):
            state = manager.load(state)
        with DilocoServer(state, token=token, unit_samples=STEPS * BATCH, total_samples=samples, port=port) as server:
            for state in server.rounds():
                manager.step(state)  # durable before a worker sees it
                assert state.model is not None and state.trainer is not None  # noqa: PT018
                model.load_state_dict(state.model.params, strict=False)
                record(run, "diloco, loss", state.trainer.samples, loss_of(model, CORPUS.heldout).item())


def work(run: Path, port: int, token: str, name: str) -> None:
    """Be a worker: its optimizer comes from its own checkpoint, its weights and its data from the server."""
    torch.set_num_threads(1)
    model = on_meta(build)
    optimizer, scheduler = inner(model)
    materialize(model, "cpu")
    worker = DilocoWorker("127.0.0.1", port, token=token)
    live = trainfold.attach(model, optimizer, scheduler=scheduler, weights=worker)
    with trainfold.CheckpointManager(run / name, every=STEPS, keep_last=2) as manager:
        manager.restore(live)
        counted = 0
        for unit in worker.units(live):
            for start in range(unit.start, unit.stop, BATCH):
                count = min(BATCH, unit.stop - start)
                train(model, optimizer, scheduler, start, count)
                live.advance(samples=count)
            manager.step(live)
            record(run, "diloco, MB", unit.stop, (worker.sent_bytes + worker.received_bytes - counted) / 1e6)
            counted = worker.sent_bytes + worker.received_bytes


def data_parallel(run: Path, samples: int) -> None:
    """Train with the batches of three workers that sum their gradients in each step, computed in one process."""
    torch.manual_seed(0)
    model = build()
    optimizer, scheduler = inner(model)
    batch = WORKERS * BATCH
    sent = 2 * (WORKERS - 1) * sum(each.nbytes for each in model.parameters())  # by the three together, in a ring
    for step in range(1, samples // batch + 1):
        train(model, optimizer, scheduler, (step - 1) * batch, batch)
        if step % STEPS == 0:
            record(run, "data parallel, loss", step * batch, loss_of(model, CORPUS.heldout).item())
            record(run, "data parallel, MB", step * batch, sent * STEPS / 1e6)


def draw(run: Path) -> None:
    """Draw the losses, and the bytes that all workers together have sent and received."""
    import matplotlib.pyplot as plt

    figure, (losses, network) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for who in ("data parallel", "diloco"):
        losses.plot(*zip(*points_of(run, f"{who}, loss"), strict=True), label=who)
        tokens, sent = zip(*points_of(run, f"{who}, MB"), strict=True)
        network.plot(tokens, list(itertools.accumulate(sent)))
    losses.set(xlabel="tokens", ylabel="held-out loss, nats per byte", title="loss")
    network.set(xlabel="tokens", ylabel="MB, all workers together", yscale="log", title="sent over the network")
    losses.legend()
    figure.savefig(run / "diloco.png", dpi=110)


def main(run: Path, samples: int) -> None:
    """Start all, kill two, train the other way, and draw."""
    run.mkdir(parents=True)
    (run / "diloco, loss.txt").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port, token = free.getsockname()[1], secrets.token_urlsafe()

    def start(role: Any, *arguments: Any) -> Any:
        process = multiprocessing.get_context("spawn").Process(target=role, args=(run, port, token, *arguments))
        process.start()
        return process

    def wait_for_round(number: int) -> None:
        while server.is_alive() and len(points_of(run, "diloco, loss")) < number:
            time.sleep(0.05)

    server = start(serve, samples)
    workers = [start(work, f"worker-{number}") for number in range(WORKERS)]
    wait_for_round(4)
    workers[1].kill()
    wait_for_round(8)
    workers[1] = start(work, "worker-1")
    wait_for_round(12)
    server.kill()
    server.join()
    server = start(serve, samples)
    for each in (server, *workers):
        each.join()
        assert each.exitcode == 0
    data_parallel(run, samples)
    draw(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int([*sys.argv, "36000"][2]))

"""The training run of the demo, in its own process: the same command starts it and resumes it.

``python -m trainfold.adapters.cli.demo.train RUN [--async]`` reads the settings next to RUN, saves into RUN, appends its record to
``RUN.jsonl`` and repeats the record on its standard output. With ``--async`` it saves in the background. torchrun starts it on several
processes: each computes its share of the batches, and rank 0 writes the record. It does not know whether it will be killed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
from torch.nn import functional

from trainfold.adapters.cli.demo.corpus import as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.held_out import held_out_losses
from trainfold.adapters.cli.demo.model import make_model
from trainfold.adapters.cli.demo.settings import DemoSettings, read_settings
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.flight.record_file import RecordFile
from trainfold.backends.ranks.in_process import SingleProcess
from trainfold.backends.ranks.torch_distributed import TorchCollectives
from trainfold.backends.runs.api import load, plan, save
from trainfold.core.data.cursor import make_cursor, shard_of
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.layout.world import Collectives
from trainfold.core.optim.schedule import horizon, wsd
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.save.events import Event
from trainfold.core.state.state import TrainState
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step

_LEARNING_RATE = 1e-3

Boundary = Callable[[TrainState, int], object]
"""Called after each step, with the state and the number of steps done: saves when a save is due."""


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: dict[str, torch.Tensor]) -> Loss:
    """The sum of the losses of all bytes, and the number of bytes."""
    logits = model(batch["x"])
    nats = functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return Loss(sum=nats, weight=batch["y"].numel())


def train(
    run: Path, settings: DemoSettings, log: RecordFile, *, ranks: Collectives, in_background: bool = False
) -> None:
    """Train from the newest checkpoint of the run, or from the start, to the end; then evaluate.

    Args:
        run: the run's directory.
        settings: what to train.
        log: records each step and each save.
        ranks: the processes of the run. Rank 0 evaluates, alone.
        in_background: save while the loop continues. The bits of the run do not depend on it.
    """
    corpus = make_corpus(help_text(), context=settings.context, heldout_bytes=settings.heldout_bytes)
    model = make_model(settings)
    adamw = optimizer(torch.optim.AdamW, lr=_LEARNING_RATE, weight_decay=0.1, fused=True)
    steps = horizon(max_steps=settings.steps)
    schedule = wsd(steps, warmup_steps=max(1, steps // 10), decay_steps=max(1, steps // 4))
    step = make_step(
        model,
        loss_fn,
        adamw,
        schedule=schedule,
        accumulate=settings.accumulate,
        clip_norm=1.0,
        donate=settings.donate,
        collectives=ranks,
    )
    cursor = make_cursor(len(corpus.train), seed=settings.seed)
    fresh = init_state(model, adamw, seed=settings.seed, schedule=schedule, dataset=cursor)
    state, resumed_from = resume_run(run, fresh, ranks)
    first = 0 if state.trainer is None else state.trainer.step
    log.write("start", first, resumed_from=resumed_from, pids=ranks.gather(os.getpid()))
    with (_saves_in_background if in_background else _saves_in_the_loop)(run, settings, log, ranks) as boundary:
        for done in range(first + 1, steps + 1):
            cursor = state.dataset
            share = shard_of(cursor.batch_across(settings.batch_size), ranks.rank, ranks.world_size)
            chosen = torch.from_numpy(share)
            state, metrics = step(state, as_batch(corpus.train[chosen]))
            state = state.evolve(dataset=cursor.advance(settings.batch_size))
            log.write("step", done, loss=float(metrics["loss"]))
            boundary(state, done)
    if ranks.rank != 0:
        return
    measured = held_out_losses(state, model, corpus)
    log.write("done", steps, fingerprints=fingerprint(state), evaluation=measured.loss, measured=attrs.asdict(measured))


@contextlib.contextmanager
def _saves_in_the_loop(run: Path, settings: DemoSettings, log: RecordFile, ranks: Collectives) -> Iterator[Boundary]:
    """Save in the call: the loop waits for the disk."""

    def boundary(state: TrainState, done: int) -> None:
        if done % settings.save_every == 0 or done == settings.steps:
            log.write("save", done)
            save(state, run, collectives=ranks)
            log.write("saved", done)

    yield boundary


@contextlib.contextmanager
def _saves_in_background(run: Path, settings: DemoSettings, log: RecordFile, ranks: Collectives) -> Iterator[Boundary]:
    """Save at the same steps while the loop continues.

    A commit is reported at the next boundary, so its record says how many seconds ago the manifest, which commits it, was written.
    """

    def record(event: Event) -> None:
        if event.kind == "saved" and event.step is not None:
            log.write("save", event.step)
        if event.kind == "committed" and event.step is not None:
            written = (run / str(event.checkpoint) / MANIFEST).stat().st_mtime
            log.write("saved", event.step, secs_ago=max(0.0, time.time() - written))

    with CheckpointManager(run, every=settings.save_every, mode="async", on_event=record, collectives=ranks) as manager:
        yield lambda state, done: manager.finish(state) if done == settings.steps else manager.step(state)


def resume_run(run: Path, fresh: TrainState, ranks: Collectives) -> tuple[TrainState, str | None]:
    """Load the newest complete checkpoint of a run; return its state and its name, or the fresh state and None if there is none.

    Raises:
        ResumeRefused: if there are checkpoints, but none of them continues this run exactly.
    """
    planned = plan(run, like=fresh)
    if isinstance(planned, Refusal):
        if planned.finds_nothing:
            return fresh, None
        return load(run, like=fresh, collectives=ranks), None  # raises, with every reason
    return load(run, like=fresh, collectives=ranks), planned.checkpoint


def _ranks(settings: DemoSettings) -> Collectives:
    if settings.nproc == 1:
        return SingleProcess()
    torch.distributed.init_process_group("gloo")
    return TorchCollectives()


def main() -> int:
    """Train in the run that is named on the command line."""
    run = Path(sys.argv[1])
    settings = read_settings(run.parent)
    torch.set_num_threads(settings.threads)
    ranks = _ranks(settings)
    if ranks.rank == 0:
        log = RecordFile(run.with_suffix(".jsonl"), watcher=sys.stdout.fileno(), clock=time.monotonic)
    else:
        log = RecordFile(Path(os.devnull), clock=time.monotonic)
    try:
        train(run, settings, log, ranks=ranks, in_background="--async" in sys.argv[2:])
    except BrokenPipeError:  # the demo that reads this record has ended, so the result is not needed
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

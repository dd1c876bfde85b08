"""The run itself, as a process of its own: the same command starts it and resumes it.

``python -m trainfold.adapters.cli.demo.train RUN`` reads the settings beside RUN, saves into RUN, appends what happens to
``RUN.jsonl`` and repeats it on its standard output. It does not know whether somebody means to kill it.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from torch.nn import functional

from trainfold.adapters.cli.demo.corpus import as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.evaluation import measure
from trainfold.adapters.cli.demo.model import make_model
from trainfold.adapters.cli.demo.settings import DemoSettings, read_settings
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.record_file import RecordFile
from trainfold.core.data.cursor import make_cursor
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.optim.optimizer import optimizer
from trainfold.core.optim.schedule import horizon, wsd
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.state.state import TrainState
from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.step import make_step

_LEARNING_RATE = 1e-3


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: dict[str, torch.Tensor]) -> Loss:
    """The sum of the losses of all bytes, and how many they are."""
    logits = model(batch["x"])
    nats = functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return Loss(sum=nats, weight=batch["y"].numel())


def train(run: Path, settings: DemoSettings, log: RecordFile) -> None:
    """Train from the newest checkpoint of the run, or from the start, to the end; then evaluate.

    Args:
        run: the run's directory.
        settings: what to train.
        log: is told of everything.
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
    )
    cursor = make_cursor(len(corpus.train), seed=settings.seed)
    fresh = init_state(model, adamw, seed=settings.seed, schedule=schedule, dataset=cursor)
    state, resumed_from = resume(run, fresh)
    first = 0 if state.trainer is None else state.trainer.step
    log.write("start", first, resumed_from=resumed_from)
    for done in range(first + 1, steps + 1):
        cursor = state.dataset
        chosen = torch.from_numpy(cursor.batch_across(settings.batch_size))
        state, metrics = step(state, as_batch(corpus.train[chosen]))
        state = state.evolve(dataset=cursor.advance(settings.batch_size))
        log.write("step", done, loss=float(metrics["loss"]))
        if done % settings.save_every == 0 or done == steps:
            log.write("save", done)
            save(state, run)
            log.write("saved", done)
    measured = measure(state, model, corpus)
    log.write("done", steps, fingerprints=fingerprint(state), evaluation=measured.loss, measured=attrs.asdict(measured))


def resume(run: Path, fresh: TrainState) -> tuple[TrainState, str | None]:
    """The newest whole checkpoint of a run and its name, or the fresh state and None where there is none yet.

    Raises:
        ResumeRefused: if there are checkpoints, and none that continues this run exactly.
    """
    planned = plan(run, like=fresh)
    if isinstance(planned, Refusal):
        if planned.finds_nothing:
            return fresh, None
        return load(run, like=fresh), None  # raises, with every reason
    return load(run, like=fresh), planned.checkpoint


def main() -> int:
    """Train in the run that the command line names."""
    run = Path(sys.argv[1])
    settings = read_settings(run.parent)
    torch.set_num_threads(settings.threads)
    log = RecordFile(run.with_suffix(".jsonl"), watcher=sys.stdout.fileno(), clock=time.monotonic)
    try:
        train(run, settings, log)
    except BrokenPipeError:  # whoever watched has gone, and nobody wants the result
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

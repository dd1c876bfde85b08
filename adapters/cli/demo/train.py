"""The run itself, as a process of its own: the same command starts it and resumes it.

``python -m trainfold.adapters.cli.demo.train RUN`` reads the settings beside RUN, saves into RUN, appends what happens to
``RUN.jsonl`` and repeats it on its standard output. It does not know whether somebody means to kill it.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

import trainfold
from trainfold import Loss, TrainState
from trainfold.adapters.cli.demo.corpus import Corpus, as_batch, help_text, make_corpus
from trainfold.adapters.cli.demo.events import EventLog
from trainfold.adapters.cli.demo.model import GPT, make_model
from trainfold.adapters.cli.demo.settings import Settings, read_settings
from trainfold.core.cursor import make_cursor
from trainfold.core.errors import CheckpointMissing
from trainfold.core.schedule import wsd

_LEARNING_RATE = 1e-3
_EVALUATION_BATCH = 32


def loss_fn(model, batch: dict[str, torch.Tensor]) -> Loss:
    """The sum of the losses of all bytes, and how many they are."""
    logits = model(batch["x"])
    nats = functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return Loss(sum=nats, weight=batch["y"].numel())


def train(run: Path, settings: Settings, log: EventLog) -> None:
    """Train from the newest checkpoint of the run, or from the start, to the end; then evaluate.

    Args:
        run: the run's directory.
        settings: what to train.
        log: is told of everything.
    """
    corpus = make_corpus(help_text(), context=settings.context, heldout_bytes=settings.heldout_bytes)
    model = make_model(settings)
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=_LEARNING_RATE, weight_decay=0.1, fused=True)
    schedule = wsd(settings.steps, warmup_steps=max(1, settings.steps // 10), decay_steps=max(1, settings.steps // 4))
    cursor = make_cursor(len(corpus.train), seed=settings.seed)
    fresh = trainfold.init_state(model, adamw, seed=settings.seed, schedule=schedule, dataset=cursor)
    step = trainfold.make_step(
        model,
        loss_fn,
        adamw,
        schedule=schedule,
        accumulate=settings.accumulate,
        clip_norm=1.0,
        donate=settings.donate,
    )
    state, resumed_from = resume(run, fresh)
    log.write("start", state.trainer.step, resumed_from=resumed_from)
    while state.trainer.step < settings.steps:
        cursor = state.dataset
        batch = as_batch(corpus.train[cursor.batch_across(settings.batch_size)])
        state, metrics = step(state, batch)
        state = state.evolve(dataset=cursor.advance(settings.batch_size))
        done = state.trainer.step
        log.write("step", done, loss=float(metrics["loss"]))
        if done % settings.save_every == 0 or done == settings.steps:
            log.write("save", done)
            trainfold.save(state, run)
            log.write("saved", done)
    loss = evaluate(state, model, corpus)
    log.write("done", state.trainer.step, fingerprints=trainfold.fingerprint(state), evaluation=loss)


def resume(run: Path, fresh: TrainState) -> tuple[TrainState, str | None]:
    """The newest whole checkpoint of a run and its name, or the fresh state and None where there is none yet."""
    try:
        state = trainfold.load(run, like=fresh)
    except CheckpointMissing:
        return fresh, None
    return state, f"step-{state.trainer.step:08d}"


def evaluate(state: TrainState, model: GPT, corpus: Corpus) -> float:
    """The mean loss of the held-out bytes, in nats, without dropout; summed in a fixed order in float64."""
    template = trainfold.bind_model(model, state)
    total, count = 0.0, 0
    with torch.inference_mode():
        for chosen in corpus.heldout.split(_EVALUATION_BATCH):
            loss = loss_fn(template, as_batch(chosen))
            total += float(loss.sum.double())
            count += loss.weight
    return total / count


def main() -> int:
    """Train in the run that the command line names."""
    run = Path(sys.argv[1])
    settings = read_settings(run.parent)
    torch.set_num_threads(settings.threads)
    log = EventLog(run.with_suffix(".jsonl"), watcher=sys.stdout.fileno(), clock=time.monotonic)
    try:
        train(run, settings, log)
    except BrokenPipeError:  # whoever watched has gone, and nobody wants the result
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A training loop made of functions. Kill it at any time and start it again: it ends with the same bits.

Run it with ``python examples/functional_loop.py runs/functional``.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import trainfold
from trainfold import Loss
from trainfold.states import TrainableState

SAMPLES, EPOCHS, MAX_STEPS = 1000, 2, 60
BATCH_SIZE, MICROBATCH_SIZE, SAVE_EVERY = 16, 8, 5


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a thousand samples of a function to learn."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    return x, x.sin().sum(dim=1, keepdim=True)


def loss_fn(model: Callable[[torch.Tensor], torch.Tensor], batch: dict[str, torch.Tensor]) -> Loss:
    """Return a sum and the number of its terms, never a mean."""
    return Loss(sum=(model(batch["x"]) - batch["y"]).square().sum(), weight=len(batch["y"]))


def start_or_resume(run: Path, fresh: TrainableState) -> TrainableState:
    """Load the newest checkpoint of the run, or return the fresh state if there is none. Anything else raises, with reasons."""
    plan = trainfold.plan(run, like=fresh)  # a value: nothing has been loaded yet
    if isinstance(plan, trainfold.Refusal) and plan.finds_nothing:
        return fresh
    return trainfold.load(run, like=fresh)


def main(run: Path) -> None:
    """Train to the end, from the current position of the run."""
    # an impossible plan raises here, before a model exists; the run and its schedule share one number of steps
    accumulate = trainfold.accumulation.accumulation_steps(per_step=BATCH_SIZE, per_microbatch=MICROBATCH_SIZE)
    data_steps = trainfold.accumulation.check_plan(
        microbatches=SAMPLES // MICROBATCH_SIZE, accumulate=accumulate, epochs=EPOCHS, max_steps=MAX_STEPS
    )
    steps = trainfold.schedules.horizon(data_steps=data_steps)

    x, y = make_data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-2)
    schedule = trainfold.schedules.wsd(steps, warmup_steps=5, decay_steps=20)
    step = trainfold.make_step(
        model, loss_fn, adamw, schedule=schedule, accumulate=accumulate, clip_norm=1.0, donate=True
    )

    cursor = trainfold.data.make_cursor(len(x), seed=0)
    fresh = trainfold.init_state(model, adamw, seed=0, schedule=schedule, dataset=cursor)
    state = start_or_resume(run, fresh)
    print(f"starting after step {state.trainer.step}", flush=True)

    for done in range(state.trainer.step + 1, steps + 1):
        cursor = state.dataset
        chosen = torch.from_numpy(cursor.batch_across(BATCH_SIZE))
        state, metrics = step(state, {"x": x[chosen], "y": y[chosen]})
        state = state.evolve(dataset=cursor.advance(BATCH_SIZE))  # the position is part of the state
        print(f"step {done}: loss {metrics['loss']:.4f}", flush=True)
        if done % SAVE_EVERY == 0:
            trainfold.save(state, run)  # durable when it returns

    for component, digest in trainfold.fingerprint(state).items():
        print(f"{component:10} {digest}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

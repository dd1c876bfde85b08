"""Calls that a user's type checkers must pass, and calls that they must refuse; tests/project/test_typing.py checks this file.

mypy and pyright read it and nothing runs it. A refused call carries the ignores of both checkers, and both report an
ignore that is not needed: so a call that begins to pass fails the test as well.
"""

from collections.abc import Callable
from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import trainfold
from trainfold import Loss, TrainState
from trainfold.managers import Restored
from trainfold.states import ModelState, TrainableState
from trainfold.transforms import Transform, compose, drop, hub_rules, rename

Batch = dict[str, torch.Tensor]
model = nn.Linear(2, 1)
torch_adamw = torch.optim.AdamW(model.parameters())
adamw = trainfold.optimizer(torch.optim.AdamW, lr=1e-3)


def loss_fn(forward: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Loss:
    """A loss function over batches of one type."""
    return Loss(sum=forward(batch["x"]).sum(), weight=len(batch["x"]))


# --- an optimizer is a pair of pure functions, never a torch optimizer ------------------------------------------------

state = trainfold.init_state(model, adamw)
step = trainfold.make_step(model, loss_fn, adamw)
init, update = adamw
trainfold.init_state(model, (init, update))
trainfold.make_step(model, loss_fn, (init, update))
trainfold.attach(model, torch_adamw)

trainfold.init_state(model, torch_adamw)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.make_step(model, loss_fn, torch_adamw)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.make_step(model, loss_fn, torch.optim.AdamW)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.optimizer(torch_adamw)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.attach(model, adamw)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- the loss function's batch type is the step's ---------------------------------------------------------------------

batch: Batch = {"x": torch.ones(4, 2)}
state, metrics = step(state, batch)
state, metrics = step(state, [batch, batch])  # ready-made microbatches
assert_type(metrics, dict[str, float])

step(state, torch.ones(4, 2))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
step(state, [torch.ones(4, 2)])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
step(model, batch)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# --- what trains has a model and counters; any other state may lack them ----------------------------------------------

assert_type(state, TrainableState)
assert_type(state.model, ModelState)
assert_type(state.model.params["weight"], torch.Tensor)
assert_type(state.trainer.step, int)
assert_type(state.evolve(dataset=None).trainer.step, int)
assert_type(trainfold.load("runs/a", like=state), TrainableState)
assert_type(trainfold.load("runs/a", like=TrainState()), TrainState)

manager = trainfold.CheckpointManager("runs/a")
assert_type(manager.load(state), TrainableState)
assert_type(manager.load_best(state), TrainableState)
assert_type(manager.load(trainfold.attach(model)), Restored)
assert_type(trainfold.select(state, ["model"]), TrainState)

done = trainfold.select(state, ["model"]).trainer.step  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
params = TrainState().model.params  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


# --- param groups: a rule is an expression, or a function of the name, or of the name and the tensor ------------------

trainfold.optimizer(torch.optim.AdamW, groups=[(r"bias$", {"lr": 0.0})])
trainfold.optimizer(torch.optim.AdamW, groups=[(lambda name: name.endswith("bias"), {"lr": 0.0})])
trainfold.optimizer(torch.optim.AdamW, groups=[(lambda name, p: p.dim() < 2, {"weight_decay": 0.0})])

trainfold.optimizer(torch.optim.AdamW, groups=[(7, {"lr": 0.0})])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


# --- metrics of several classes in a variable need the type of a suite ------------------------------------------------

suite: trainfold.metrics.Suite = {"loss": trainfold.metrics.Ratio(), "worst": trainfold.metrics.Max()}
trainfold.evaluate(lambda batch: {"loss": (batch, len(batch)), "worst": batch}, [torch.ones(2)], suite)


# --- rules that have an inverse need no check for one -----------------------------------------------------------------

rules: Transform = compose(rename("a", "b"), hub_rules("gpt2", tied=True).inverse).inverse
rules = compose(rename("a", "b"), drop("c")).inverse  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


# --- closed choices ---------------------------------------------------------------------------------------------------

trainfold.CheckpointManager("runs/a", mode="async", when_busy="skip", check_replicas="full", every="auto")
trainfold.CheckpointManager("runs/a", check_replicas=500)
trainfold.managers.CheckpointConfig(run=Path("runs/a"), mode="async", when_busy="skip", check_replicas="full")
trainfold.load("runs/a", like=state, policy={"dtype": "adapt"})
trainfold.accumulation.check_plan(microbatches=3, accumulate=2, tail="drop")

trainfold.CheckpointManager("runs/a", mode="asynchronous")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.CheckpointManager("runs/a", when_busy="drop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.CheckpointManager("runs/a", check_replicas="all")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.CheckpointManager("runs/a", every="often")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.CheckpointManager("runs/a", policy={"dtype": "ignore"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
trainfold.managers.CheckpointConfig(run="runs/a", mode="both")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.load("runs/a", like=state, policy={"dtype": "ignore"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
trainfold.plan("runs/a", like=state, policy={"dtype": "ignore"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
trainfold.accumulation.check_plan(microbatches=3, accumulate=2, tail="keep")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.retention.keep_best(3, direction="up")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.schedules.wsd(10, decay_steps=2, decay="exponential")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
trainfold.metrics.F1(3, average="weighted")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

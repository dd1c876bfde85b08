"""A loop with accelerate that is killed and resumed ends with the bits of one that was never killed; `make rivals` installs it."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from kit.forks import ended, forked, kill_at_rename, started
from kit.free_port import free_port
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import trainfold

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow(60), pytest.mark.long, pytest.mark.filterwarnings("ignore")]
STEPS = 9  # three epochs of three: of five batches two, two and one


class Data(Dataset):
    """Of samples that are drawn again in each epoch."""

    def __len__(self):
        return 19

    def __getitem__(self, index):
        return torch.randn(3, generator=torch.Generator().manual_seed(index)) + torch.rand(3), torch.tensor(index)


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))  # fmt: skip


def prepared(*, mixed_precision=None, workers=0, ranks=1, **loader):
    """The accelerator and what it has prepared: model, optimizer, scheduler, loader."""
    accelerate.utils.set_seed(0)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision=mixed_precision,
        dataloader_config=accelerate.utils.DataLoaderConfiguration(**loader),
    )
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if ranks > 1:
        torch.manual_seed(1 + accelerator.process_index)  # other dropout masks on each rank
        return accelerator, model, optimizer, scheduler, DataLoader(Data(), batch_size=2, sampler=DistributedSampler(Data()))  # fmt: skip
    loader = accelerator.prepare(DataLoader(Data(), batch_size=4, shuffle=True, num_workers=workers))
    return accelerator, model, optimizer, scheduler, loader


def train(run, die_at=None, *, manager=None, rename=None, **changed):
    accelerator, model, optimizer, scheduler, loader = prepared(**changed)
    live = trainfold.attach(model, optimizer, scheduler=scheduler, loader=loader)
    collectives = trainfold.TorchCollectives(timeout_secs=60) if accelerator.num_processes > 1 else None
    arguments = {"every": 1, "keep_last": 3, "collectives": collectives, **(manager or {})}
    seen = Path(f"{run}-{accelerator.process_index}.seen")
    if rename is not None:
        kill_at_rename(rename)
    with trainfold.CheckpointManager(run, **arguments) as managed:
        managed.restore(live)
        for values, indices in live.batches(epochs=3):
            with accelerator.accumulate(model):
                loss = model(values).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    if live.progress.step == die_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            with seen.open("a") as file:
                file.write(f"{live.progress.step} {indices.tolist()} {loss.item().hex()}\n")
            live.advance()
            managed.step(live)
        if live.is_in_window:
            live.drop_window()
        managed.finish(live)


def in_new_world(function, *arguments, environment=(), **named):
    """Call it where no other test has made a state of accelerate."""
    os.environ.update(environment)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    function(*arguments, **named)


def on_ranks(count, *arguments, **named):
    """The exit codes of as many ranks."""
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    children = [started(in_new_world, train, *arguments, environment=each, ranks=count, **named) for each in ranks]
    return [ended(child) for child in children]


def last(run, ranks=1):
    """The step and the fingerprints of the last checkpoint, and every batch that was seen."""
    plan = trainfold.plan(run, like=trainfold.TrainState(), components=[])
    prints = {each.name: each.fingerprint for each in plan.manifest.components}
    assert {"model", "optimizer", "scheduler", "dataset", "rng"} <= prints.keys()
    return plan.step, prints, [{*Path(f"{run}-{rank}.seen").read_text().splitlines()} for rank in range(ranks)]


@pytest.mark.parametrize(
    ("changed", "kills"),
    [
        ({}, [0, 1, 2, 3, 4, 8]),  # before the first save; inside an epoch; at its end and start; at the last step
        ({"manager": {"mode": "async"}}, [1, 4]),
        ({"use_seedable_sampler": True}, [1, 4]),
        ({"workers": 2}, [1, 4]),
        ({"mixed_precision": "bf16"}, [1, 4]),
        ({"manager": {"every": 2}}, [1, 3, 8]),
    ],
    ids=["plain", "async", "seedable", "workers", "bf16", "every"],
)
def test_a_killed_loop_resumes_bit_for_bit(changed, kills, tmp_path):
    """Accumulated, clipped, with a scheduler and dropout, through what `accelerator.prepare` has returned."""
    assert forked(in_new_world, train, str(tmp_path / "whole"), **changed) == 0
    whole = last(tmp_path / "whole")
    assert whole[0] == STEPS
    for step in kills:
        run = str(tmp_path / f"killed-{step}")
        assert forked(in_new_world, train, run, step, **changed) == -signal.SIGKILL
        assert forked(in_new_world, train, run, **changed) == 0
        assert last(run) == whole, step


def test_a_loop_that_was_killed_within_a_save_resumes_bit_for_bit(tmp_path):
    assert forked(in_new_world, train, str(tmp_path / "whole")) == 0
    whole = last(tmp_path / "whole")
    for number in (3, 7, 12, 20):
        run = str(tmp_path / f"killed-{number}")
        assert forked(in_new_world, train, run, rename=number) == -signal.SIGKILL
        assert forked(in_new_world, train, run) == 0
        assert last(run) == whole, number


def test_two_killed_ranks_resume_bit_for_bit(tmp_path):
    """With `DistributedDataParallel` and gloo, a loader of their own, and other dropout masks on each."""
    assert on_ranks(2, str(tmp_path / "whole")) == [0, 0]
    whole = last(tmp_path / "whole", 2)
    for step in (0, 1, 3, 5):
        run = str(tmp_path / f"killed-{step}")
        assert on_ranks(2, run, step) == [-signal.SIGKILL] * 2
        assert on_ranks(2, run) == [0, 0]
        assert last(run, 2) == whole, step


def of_page(run, die_at=None):
    """Run what the page says, in a folder of its own."""
    os.chdir(run)
    accelerate.utils.set_seed(0)
    page = (Path(__file__).parents[3] / "docs/how-to/bridge-trainers.md").read_text().partition("## A loop with acc")[2]
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace("every=500", "every=2"), names)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    values = torch.randn(19, 3, generator=torch.Generator().manual_seed(1))

    def kill(*_):
        if scheduler.last_epoch == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_pre_hook(kill)
    data = torch.utils.data.TensorDataset(values)
    names["run"](model, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True), 3)


def test_the_lines_of_the_page_are_enough(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert forked(in_new_world, of_page, tmp_path / "whole") == 0
    assert forked(in_new_world, of_page, tmp_path / "killed", 5) == -signal.SIGKILL
    assert forked(in_new_world, of_page, tmp_path / "killed") == 0
    one, other = (
        trainfold.plan(tmp_path / name / "runs/a", like=trainfold.TrainState(), components=[])
        for name in ("whole", "killed")
    )
    assert one.step == STEPS
    assert [each.fingerprint for each in one.manifest.components] == [
        each.fingerprint for each in other.manifest.components
    ]


def test_prepared_loaders_without_a_position_are_refused():
    """Those with a state of their own, those of a dispatcher, and those that skip."""
    *_, loader = prepared()
    skipping = accelerate.skip_first_batches(loader, 2)
    for each in (skipping, prepared(use_stateful_dataloader=True)[-1], prepared(dispatch_batches=True)[-1]):
        with pytest.raises(
            trainfold.errors.InvalidArgument, match=r"attach the (DataLoader that you passed|loader without skip)"
        ):
            trainfold.attach(net(), loader=each)

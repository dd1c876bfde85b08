"""Hyperparameters that are tensors: a tensor stays one where the optimizer here has one, and a number where it has a number."""

import pytest
import torch
from kit.backends import dcp_cases as cases
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import trainfold
from trainfold.backends.weights.foreign.settings import setting_like
from trainfold.core.errors import InvalidState, RestoreRefused, UnsupportedLeaf
from trainfold.weights import (
    accelerate_training,
    dcp_training,
    lightning_training,
    take_training,
    torch_training,
    write_dcp_directory,
)


def build(lr, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [each]} for each in model.parameters()], lr=lr, foreach=False, **more)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def write_dcp(path, model, optimizer, *, is_flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    cases.save(path, {"model": model_state, "optim": optimizer_state, "step": 1})
    return dcp_training(path)


def write_flat(path, model, optimizer):
    return write_dcp(path, model, optimizer, is_flat=True)


def write_ours(path, model, optimizer, *, is_flat=False):
    write_dcp_directory(path, trainfold.attach(model, optimizer).capture(), flatten_optimizer_state_dict=is_flat)
    return dcp_training(path)


def write_ours_flat(path, model, optimizer):
    return write_ours(path, model, optimizer, is_flat=True)


def write_torch(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, path)
    return torch_training(path)


def write_lightning(path, model, optimizer):
    found = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    torch.save({**found, "lr_schedulers": []}, path)
    return lightning_training(path)


def write_accelerate(path, model, optimizer):
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    return accelerate_training(path)


WRITERS = [write_dcp, write_flat, write_ours, write_ours_flat, write_torch, write_lightning, write_accelerate]


@pytest.mark.parametrize("write", WRITERS)
def test_a_learning_rate_that_is_a_tensor_stays_the_tensor_of_the_loop(write, tmp_path):
    """B08, M24: it became a float, so what the loop wrote into its tensor afterwards did nothing; from a file it was refused for a reason that was not true."""
    saved = build(torch.tensor(0.25))
    step(*saved)
    training = write(tmp_path / "saved", *saved)
    rate = torch.tensor(0.5)
    model, optimizer = build(rate)
    live = trainfold.attach(model, optimizer)
    live.restore(take_training(live.capture(), training))
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate == 0.25
    assert rate.dtype is torch.float32
    step(*saved)
    step(model, optimizer)
    assert cases.all_bits(model.state_dict()) == cases.all_bits(saved[0].state_dict())


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("theirs", "mine"), [(torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5))])
def test_a_setting_has_the_form_that_the_optimizer_here_has(write, theirs, mine, tmp_path):
    """M24: a number for a number, a tensor for a tensor, whichever was saved."""
    saved = build(theirs)
    step(*saved)
    training = write(tmp_path / "saved", *saved)
    model, optimizer = build(mine)
    live = trainfold.attach(model, optimizer)
    live.restore(take_training(live.capture(), training))
    for group in optimizer.param_groups:
        assert type(group["lr"]) is type(mine)
        assert group["lr"] == 0.25


@pytest.mark.parametrize("write", [write_dcp, write_flat, write_torch])
def test_settings_inside_of_a_tuple_may_be_tensors_too(write, tmp_path):
    """M24: betas."""
    saved = build(torch.tensor(0.25), betas=(torch.tensor(0.5), torch.tensor(0.75)))
    step(*saved)
    training = write(tmp_path / "saved", *saved)
    for betas in ((torch.tensor(0.9), torch.tensor(0.99)), (0.9, 0.99)):
        model, optimizer = build(torch.tensor(0.1), betas=betas)
        live = trainfold.attach(model, optimizer)
        live.restore(take_training(live.capture(), training))
        assert tuple(map(float, optimizer.param_groups[0]["betas"])) == (0.5, 0.75)
        assert [type(each) for each in optimizer.param_groups[0]["betas"]] == [type(each) for each in betas]
    with pytest.raises(UnsupportedLeaf, match=r"^optim.param_groups.0.betas: .*found Tensor"):
        write_dcp_directory(tmp_path / "ours", live_of(saved).capture())


def live_of(saved):
    return trainfold.attach(*saved)


def test_a_scheduler_with_tensors_goes_on(tmp_path):
    """M24: that of a learning rate that is a tensor has tensors; they were places in a file."""
    model, optimizer = build(torch.tensor(0.25))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step(model, optimizer)
    scheduler.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved, tmp_path / "x.pt")
    rate = torch.tensor(0.5)
    other, mine = build(rate)
    schedule = torch.optim.lr_scheduler.StepLR(mine, 2)
    live = trainfold.attach(other, mine, scheduler=schedule)
    live.restore(take_training(live.capture(), torch_training(tmp_path / "x.pt")))
    assert schedule.last_epoch == 1
    step(other, mine)
    schedule.step()
    assert mine.param_groups[0]["lr"] is rate
    torch.testing.assert_close(rate, torch.tensor(0.025))


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.5), r"^optimizer: bias.lr: expected .*float32.*found .*0.1.*float64"),
        (torch.ones(3), 0.5, r"^optimizer: bias.lr: expected a number, found a tensor of the shape \[3\]"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_one_of_the_optimizer_here_is_refused_by_name(theirs, mine, said, tmp_path):
    """P20: no dtype changes a value in silence."""
    model, optimizer = build(0.5)
    step(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = theirs
    for write in (write_dcp, write_torch):
        training = write(tmp_path / write.__name__, model, optimizer)
        state = trainfold.attach(*build(mine)).capture()
        with pytest.raises(InvalidState, match=said.replace("bias", "(bias|weight)")):
            take_training(state, training)


def test_a_tensor_that_two_groups_share_gets_one_value_or_is_refused(tmp_path):
    """W20: both groups got the rate that the second one was saved with."""
    model, optimizer = build(0.1)
    optimizer.param_groups[1]["lr"] = 0.2
    step(model, optimizer)
    source = write_torch(tmp_path / "two", model, optimizer)
    live = trainfold.attach(*build(rate := torch.tensor(0.5)))
    with pytest.raises(
        RestoreRefused, match=r"groups\['bias'\].lr: expected one value of the tensor that several groups share"
    ):
        live.restore(take_training(live.capture(), source))
    assert rate == 0.5
    optimizer.param_groups[1]["lr"] = 0.1
    live.restore(take_training(live.capture(), write_torch(tmp_path / "one", model, optimizer)))
    assert rate == torch.tensor(0.1)


@pytest.mark.parametrize(("mine", "theirs"), [(torch.tensor(1), 0.5), (torch.tensor(0.5), 1e60), (torch.tensor(0.5), 1j), (torch.tensor(0.5, dtype=torch.float16), 1e6)])  # fmt: skip
def test_a_number_that_the_dtype_of_the_tensor_here_does_not_have_is_refused(mine, theirs):
    """W20: it became 0 or an infinity in silence, or a bare error of torch."""
    with pytest.raises(InvalidState, match="lr: expected"):
        setting_like(mine, theirs, "lr")

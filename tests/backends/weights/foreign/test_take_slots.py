"""Slots of other programs' optimizers: those of factored optimizers are taken, and a directory that lacks one is refused."""

import pytest
import torch
from kit.backends import dcp_cases as cases
from torch.distributed.checkpoint.state_dict import get_state_dict

import trainfold
from trainfold.core.errors import InvalidState
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.weights import dcp_training, take_training, torch_training, write_dcp_directory


def build(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, kind(model.parameters(), lr=0.1, **options)


def train(model, optimizer, steps):
    for number in range(steps):
        rng = torch.Generator().manual_seed(number)
        model(torch.randn(5, 3, generator=rng)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def write_theirs(path, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    cases.save(path, {"model": model_state, "optim": optimizer_state, "step": 2})
    return dcp_training(path)


def write_ours(path, model, optimizer):
    write_dcp_directory(path, trainfold.attach(model, optimizer).capture())
    return dcp_training(path)


def write_file(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, path)
    return torch_training(path)


@pytest.mark.parametrize("write", [write_theirs, write_ours, write_file])
def test_factored_slots_are_taken(write, tmp_path):
    """M24: those of Adafactor were refused as if the parameters were others."""
    saved = train(*build(torch.optim.Adafactor), 2)
    training = write(tmp_path / "saved", *saved)
    model, optimizer = build(torch.optim.Adafactor)
    live = trainfold.attach(model, optimizer)
    live.restore(take_training(live.capture(), training))
    for each in (saved, (model, optimizer)):
        train(*each, 2)
    assert cases.all_bits(model.state_dict()) == cases.all_bits(saved[0].state_dict())


@pytest.mark.parametrize(
    ("kind", "options", "slot"),
    [
        (torch.optim.AdamW, {}, "exp_avg_sq"),
        (torch.optim.AdamW, {}, "step"),
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"momentum": 0.5}, "momentum_buffer"),
        (torch.optim.Adafactor, {}, "step"),
    ],
)
@pytest.mark.parametrize("write", [write_theirs, write_file])
def test_a_slot_that_every_parameter_lacks_is_named(write, kind, options, slot, tmp_path):
    """W20: as all parameters lacked it alike, it was taken, and the next step was a KeyError of torch's."""
    model, optimizer = train(*build(kind, **options), 2)
    for each in optimizer.state.values():
        del each[slot]
    training = write(tmp_path / "saved", model, optimizer)
    state = trainfold.attach(*build(kind, **options)).capture()
    with pytest.raises(InvalidState, match=rf"^optimizer: 0.weight: expected the slots .*'{slot}'.*found '{slot}' missing, and so of 3 more") as refused:  # fmt: skip
        take_training(state, training)
    assert "take_weights" in refused.value.fix


def test_a_parameter_without_any_slot_never_had_a_gradient(tmp_path):
    """B08: as in torch."""
    model, optimizer = train(*build(torch.optim.AdamW), 2)
    del optimizer.state[model[0].weight]
    training = write_file(tmp_path / "saved", model, optimizer)
    taken = take_training(trainfold.attach(*build(torch.optim.AdamW)).capture(), training)
    assert {*taken.optimizer.slots} == {"0.bias", "1.weight", "1.bias"}


def test_a_slot_of_another_shape_than_its_optimizer_makes_is_refused_by_name(tmp_path):
    """W20: rows in the place of columns, and where ranks hold parts of the parameter."""
    model, optimizer = train(*build(torch.optim.Adafactor), 2)
    training = write_file(tmp_path / "a", model, optimizer)
    state = trainfold.attach(*build(torch.optim.Adafactor)).capture()
    cut = make_shard(state.model.params["0.weight"][:2].clone(), shape=(4, 3), starts=(0, 0))
    of_rank = state.evolve(model=trainfold.states.ModelState(Leaves({**state.model.params, "0.weight": cut}), Leaves()))
    with pytest.raises(InvalidState, match=r"^optimizer: 0.weight.(row|col)_var: expected a slot that is cut as its parameter, .*in one process"):  # fmt: skip
        take_training(of_rank, training)
    each = optimizer.state[model[0].weight]
    each["row_var"], each["col_var"] = each["col_var"], each["row_var"]
    training = write_file(tmp_path / "b", model, optimizer)
    with pytest.raises(InvalidState, match=r"^optimizer: 0.weight.(row|col)_var: expected the shape \[(4, 1|1, 3)\], .*found \[(4, 1|1, 3)\]"):  # fmt: skip
        take_training(state, training)


NONE = {"momentum_buffer": None}


@pytest.mark.parametrize("entry", [{}, NONE], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("write", [write_theirs, write_file])
def test_a_parameter_without_slots_is_taken_however_torch_has_written_it(write, momentum, entry, tmp_path):
    """M24: SGD without momentum, as several versions of torch write it, was refused, or its state was; SGD makes the buffer at the next step, as for one that is not there."""
    saved = train(*build(torch.optim.SGD, momentum=momentum), 2)
    for parameter in list(saved[0].parameters())[: 4 if not momentum else 1]:
        saved[1].state[parameter] = dict(entry)
    training = write(tmp_path / "saved", *saved)
    assert f"optimizer  {3 if momentum else 0} values of 4 parameters" in str(training)
    model, optimizer = build(torch.optim.SGD, momentum=momentum)
    live = trainfold.attach(model, optimizer)
    live.restore(take_training(live.capture(), training))
    assert len(optimizer.state) == (3 if momentum else 0)
    for each in (saved, (model, optimizer)):
        train(*each, 2)
    assert cases.all_bits(model.state_dict()) == cases.all_bits(saved[0].state_dict())


def test_an_empty_entry_of_a_parameter_in_no_group_is_refused(tmp_path):
    """W20: it shows that the groups are not those of the file."""
    model, optimizer = train(*build(torch.optim.SGD), 1)
    state = optimizer.state_dict()
    state["state"][7] = {}
    torch.save({"model": model.state_dict(), "optimizer": state, "step": 1}, tmp_path / "saved")
    with pytest.raises(InvalidState, match=r"^optimizer: 7: expected a slot of a parameter in a group, found 7"):
        take_training(trainfold.attach(*build(torch.optim.SGD)).capture(), torch_training(tmp_path / "saved"))


def test_a_none_that_the_optimizer_needs_is_missing(tmp_path):
    """W20: AdamW does not go on from it."""
    model, optimizer = train(*build(torch.optim.AdamW), 1)
    for each in optimizer.state.values():
        each["exp_avg"] = None
    training = write_file(tmp_path / "saved", model, optimizer)
    with pytest.raises(InvalidState, match="found 'exp_avg' missing, and so of 3 more"):
        take_training(trainfold.attach(*build(torch.optim.AdamW)).capture(), training)

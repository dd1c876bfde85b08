"""The slots of torch's optimizers, against those that they make."""

import pytest
import torch

from trainfold.core.optim.torch_slots import slots_of_torch

OPTIONS = {"SGD": ({}, {"momentum": 0.9}), "RMSprop": ({}, {"momentum": 0.9, "centered": True}), "AdamW": ({}, {"amsgrad": True}), "Adam": ({"amsgrad": True},)}  # fmt: skip
NAMES = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_slots_that_are_expected_are_those_that_torch_makes(name):
    """W20: names and shapes, of vectors, matrices and more dimensions."""
    for options in OPTIONS.get(name, ({},)):
        for shape in ((2, 3),) if name == "Muon" else ((), (3,), (2, 3), (4, 2, 3), (1, 1)):
            parameter = torch.nn.Parameter(torch.ones(shape))
            optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **options)
            parameter.grad = torch.ones(shape)
            optimizer.step()
            kind = f"{type(optimizer).__module__}.{name}"
            made = {slot: tuple(each.shape) for slot, each in optimizer.state[parameter].items()}
            assert slots_of_torch(kind, optimizer.param_groups[0], shape) == made


def test_of_other_classes_nothing_is_expected():
    """W20: a class of another library may have any slots."""
    assert slots_of_torch("mine.AdamW", {}, (2,)) is None
    assert slots_of_torch("torch.optim.lbfgs.LBFGS", {}, (2,)) is None

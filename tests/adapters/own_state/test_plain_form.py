"""State in the containers of others: its plain form, and the undo of a load that fails halfway."""

from collections import deque

import pytest
import torch
from torch import nn

from trainfold.adapters.own_state.plain_form import from_plain, to_plain
from trainfold.core.errors import InvalidState
from trainfold.core.format.structure.describe import describe


def test_the_plain_form_comes_back():
    """W06: deques, sets, dtypes, layouts, and keys that are not strings."""
    parameter = nn.Parameter(torch.ones(2))
    value = {
        "deque": deque([torch.ones(()), None], maxlen=3),
        "set": {"b", "a"},
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "map": {(0, "a"): 1, 2: {"__trainfold__": "deque"}},
        "param": [{parameter: [parameter]}, {id(parameter): ()}],
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    form = to_plain(value, {id(parameter): "w"})
    describe(form, "extra")  # the format holds it
    back = from_plain(form, {"w": parameter})
    assert repr(back.pop("param")) == repr(value.pop("param"))
    assert torch.equal(back["deque"][0], value["deque"][0])
    turned = back.pop("turned")
    assert turned.stride() == (1, 3)
    assert torch.equal(turned, value.pop("turned"))
    assert back == value
    assert back["deque"].maxlen == 3


@pytest.mark.parametrize(
    "form",
    [
        {"__trainfold__": "os.system"},
        {"__trainfold__": ["deque"]},
        {"__trainfold__": "parameter", "name": "unknown"},
        {"__trainfold__": "deque", "items": 3, "maxlen": None},
        {"__trainfold__": "strided", "tensor": torch.ones(2, 2), "strides": [2**40, 1]},
        {"__trainfold__": "strided", "tensor": 3, "strides": [1]},
        {"__trainfold__": "dtype", "name": "torch.Tensor"},
        {"__trainfold__": "defaultdict", "factory": "eval", "of": {}},
        {"__trainfold__": "pairs", "items": [[[1], 2]]},
    ],
)
def test_a_plain_form_that_nobody_writes_is_refused(form):
    """W20: no name in it is looked up."""
    with pytest.raises(InvalidState):
        from_plain({"a": [form]}, {})

"""Random module trees with tied, shared, persistent, non-persistent, drawn and computed tensors, and their bits."""

import hashlib

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from trainfold.construct import initialize, materialize, on_meta

KINDS = (
    "linear",
    "norm",
    "embedding",
    "rope",
    "tied",
    "shared",
    "weight_norm",
    "trunc",
    "clones",
    "hostile",
    "half",
    "double",
)


class Rope(nn.Module):
    """Computes its table where it is made, as rotary embeddings do; the table is in no checkpoint."""

    def __init__(self, base):
        super().__init__()
        self.register_buffer("table", 1.0 / (base ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.original = self.table  # a plain attribute, which `_apply` does not see
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))


class Shared(nn.Module):
    """A parameter and a buffer that are tied to themselves, and two parameters that a third was computed from."""

    def __init__(self):
        super().__init__()
        draw = torch.randn(3, 2)
        self.a, self.b = nn.Parameter(draw * 2), nn.Parameter(draw + 1)
        self.register_buffer("mean", torch.full((3,), 0.5))
        self.register_buffer("alias", self.mean)


class Hostile(nn.Module):
    """Its init functions write everything it has, whatever was loaded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.register_buffer("scale", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            for each in (*self.parameters(), *self.buffers()):
                each.uniform_(-1, 1)
            self.weight[0].zero_()

    _init_weights = reset_parameters


class Net(nn.Module):
    """Parts of these kinds, in this order; ``layers[i]`` does not depend on the others except where it is tied."""

    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList()
        for kind in kinds:
            self.layers.append(self._layer(kind))

    def _layer(self, kind):
        if kind == "tied":
            found = nn.Linear(3, 5, bias=False)
            known = [each for each in self.layers if isinstance(each, nn.Embedding)]
            if known:
                found.weight = known[0].weight
            return found
        makers = {
            "linear": lambda: nn.Linear(3, 4),
            "norm": lambda: nn.BatchNorm1d(4),
            "embedding": lambda: nn.Embedding(5, 3, padding_idx=1),
            "rope": lambda: Rope(100.0),
            "shared": Shared,
            "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
            "trunc": lambda: _truncated(nn.Linear(3, 4)),
            "clones": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
            "hostile": Hostile,
            "double": _double,
            "half": lambda: nn.Linear(3, 4).to(torch.bfloat16),
        }
        return makers[kind]()


def _double():
    """Built where torch's default dtype is another one, by a division whose result has that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = nn.Linear(3, 4)
        found.register_buffer("steps", torch.arange(4) / 3, persistent=False)
        found.register_buffer("twice", found.steps * 2)
    finally:
        torch.set_default_dtype(before)
    return found


def _truncated(layer):
    nn.init.trunc_normal_(layer.weight, std=0.02)
    return layer


def kinds(min_size=1, max_size=5):
    return st.lists(st.sampled_from(KINDS), min_size=min_size, max_size=max_size)


def built(chosen, *, seed=0, device="cpu"):
    """The net, built on meta and initialised."""
    model = on_meta(lambda: Net(chosen))
    materialize(model, device)
    initialize(model, seed=seed)
    return model


def tensors(model):
    """Every tensor by name: parameters and buffers, persistent or not, each place once."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def bits(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    dense = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha1(dense.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def all_bits(model):
    return {name: bits(each) for name, each in tensors(model).items()}

"""Shared cases for the tests of steps."""

import torch

from trainfold.core import tree
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer


class Net(torch.nn.Module):
    """Everything in which a step could leave a trace: batch statistics, dropout, a tie, a frozen part, a cache."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.cache += 1
        assert self.cache[0] <= 3, "the cache of an earlier step is still there"
        hidden = self.drop(self.norm(self.embed(x)))
        return self.head(self.frozen(hidden) + hidden)


def net_loss(model, batch):
    nll = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return Loss(sum=nll, weight=batch["y"].numel(), metrics={"half": (1, 2)})


def make_net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def make_batch(seed, samples=6):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(7, (2, samples), generator=generator)
    return {"x": x, "y": y}


def bits(value):
    return [(path, leaf.clone() if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in tree.named_leaves(value)]


def assert_same_bits(left, right):
    left, right = bits(left), bits(right)
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, a), (_, b) in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, path
            assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), path
        else:
            assert a == b, path


def adamw(**hyper):
    return optimizer(torch.optim.AdamW, lr=0.01, **hyper)

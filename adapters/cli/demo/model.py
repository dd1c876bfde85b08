"""The demo's model: a byte-level GPT in plain torch, without any trainfold code."""

from typing import final

import torch
from torch import nn
from torch.nn import functional

from trainfold.adapters.cli.demo.settings import DemoSettings

_VOCABULARY = 256


@final
class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a GELU MLP, with dropout after each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """float[b, t, width] to the same shape."""
        b, t, width = hidden.shape
        qkv = self.qkv(self.norm_1(hidden)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, width)))
        widened: torch.Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm_2(hidden)))))
        return hidden + widened


@final
class GPT(nn.Module):
    """A model from bytes to the logits of the next byte."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """int64[b, t] to float[b, t, 256]."""
        hidden = self.dropout(self.embed(x) + self.position.weight[: x.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def make_model(settings: DemoSettings) -> GPT:
    """The model of these settings, with weights from their seed; the global generator is not changed.

    Examples:
        >>> from trainfold.adapters.cli.demo.settings import make_settings
        >>> sum(parameter.numel() for parameter in make_model(make_settings()).parameters())
        4882432
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return GPT(
            layers=settings.layers,
            width=settings.width,
            heads=settings.heads,
            context=settings.context,
            dropout=settings.dropout,
        )

"""A character-level GPT on the Zen of Python: learning rate set by hand, accumulated gradients, the next batch drawn ahead.

Based on nanoGPT's training loop, rewritten and smaller.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional

import trainfold

TEXT = """Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex.
Complex is better than complicated. Flat is better than nested. Sparse is better than dense. Readability counts.
Special cases aren't special enough to break the rules. Although practicality beats purity.
Errors should never pass silently. Unless explicitly silenced. In the face of ambiguity, refuse the temptation to guess."""
BLOCK, BATCH, WIDTH, HEADS, LAYERS = 16, 4, 32, 2, 2
MAX_ITERS, WARMUP, ACCUMULATE, EVAL_EVERY = 200, 5, 2, 5

chars = sorted(set(TEXT))
data = torch.tensor([chars.index(char) for char in TEXT])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        dropped = 0.1 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(chars), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(chars), bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, x, targets):
        x = self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split):
    source = train_data if split == "train" else val_data
    starts = torch.randint(len(source) - BLOCK, (BATCH,))
    return torch.stack([source[i : i + BLOCK] for i in starts]), torch.stack(
        [source[i + 1 : i + 1 + BLOCK] for i in starts]
    )


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    loss = torch.stack([model(*get_batch("val")) for _ in range(2)]).mean()
    model.train()
    return loss.item()


def learning_rate(iteration):
    if iteration < WARMUP:
        return 1e-2 * (iteration + 1) / WARMUP
    return 1e-3 + 0.5 * 9e-3 * (1 + math.cos(math.pi * (iteration - WARMUP) / (MAX_ITERS - WARMUP)))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
options = parser.parse_args()

torch.manual_seed(1337)
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
best_val_loss = 1e9
X, Y = get_batch("train")  # the next batch is always drawn ahead of the step


def get_ahead():
    return {"x": X, "y": Y, "best_val_loss": best_val_loss}


def set_ahead(saved):
    global X, Y, best_val_loss
    X, Y, best_val_loss = saved["x"], saved["y"], saved["best_val_loss"]


live = trainfold.attach(model, optimizer, extra={"ahead": (get_ahead, set_ahead)})
manager = trainfold.CheckpointManager(options.out, every=50)
manager.restore(live)
for iteration in range(live.progress.step, MAX_ITERS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(iteration)
    if iteration % EVAL_EVERY == 0:
        val_loss = estimate_loss(model)
        live.record(val_loss=val_loss)
        best_val_loss = min(best_val_loss, val_loss)
    for _ in range(ACCUMULATE):
        loss = model(X, Y) / ACCUMULATE
        X, Y = get_batch("train")
        loss.backward()
        live.record(loss=loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    live.record(norm=norm, best=best_val_loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    live.advance(samples=BATCH * ACCUMULATE, tokens=BATCH * ACCUMULATE * BLOCK)
    manager.step(live)
    if manager.should_stop:
        break
manager.close()

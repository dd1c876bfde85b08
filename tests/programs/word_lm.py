"""A word language model: an LSTM whose hidden state goes on from batch to batch, and a rate that is divided when it gets worse.

Based on the word language model of pytorch/examples, rewritten and smaller: no optimizer class, an update by hand.
"""

import argparse

import torch
from torch import nn

import trainfold

WORDS, WIDTH, BPTT, BATCH, CLIP = 20, 16, 5, 4, 0.25


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return weight.new_zeros(2, BATCH, WIDTH), weight.new_zeros(2, BATCH, WIDTH)


def make_corpus(length, seed):
    """A random walk on the words: the next one is near the last one."""
    moves = torch.randint(-2, 3, (length,), generator=torch.Generator().manual_seed(seed))
    words = moves.cumsum(0).remainder(WORDS)
    return words[: length // BATCH * BATCH].view(BATCH, -1).t().contiguous()


def get_batch(source, i):
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


@torch.no_grad()
def evaluate(model):
    model.eval()
    total, memory = 0.0, model.init_hidden()
    for i in range(0, len(val_data) - 1, BPTT):
        words, targets = get_batch(val_data, i)
        output, memory = model(words, memory)
        total += len(words) * criterion(output, targets).item()
    model.train()
    return total / (len(val_data) - 1)


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()
torch.manual_seed(1111)
train_data, val_data = make_corpus(140, seed=1), make_corpus(60, seed=2)
model, criterion = RNNModel(), nn.CrossEntropyLoss()
lr, best_val_loss, hidden = 20.0, None, model.init_hidden()


def get_rest():
    return {"hidden": list(hidden), "lr": lr, "best_val_loss": best_val_loss}


def set_rest(saved):
    global hidden, lr, best_val_loss
    hidden, lr, best_val_loss = tuple(saved["hidden"]), saved["lr"], saved["best_val_loss"]


live = trainfold.attach(model, extra={"rest": (get_rest, set_rest)})
manager = trainfold.CheckpointManager(args.out, every=100)
manager.restore(live)
starts = range(0, len(train_data) - 1, BPTT)
while live.progress.step < args.epochs * len(starts) and not manager.should_stop:
    i = starts[live.progress.step % len(starts)]
    words, targets = get_batch(train_data, i)
    model.zero_grad()
    hidden = tuple(each.detach() for each in hidden)
    output, hidden = model(words, hidden)
    loss = criterion(output, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-lr)  # pyright: ignore[reportArgumentType]
    live.record(loss=loss, lr=lr)
    live.advance(samples=BATCH, tokens=targets.numel())
    if i == starts[-1]:
        val_loss = evaluate(model)
        live.record(val_loss=val_loss)
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0
        hidden = model.init_hidden()
    manager.step(live)
manager.close()

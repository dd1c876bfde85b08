"""Evaluate a causal language model exactly: kill it at any time and start it again, with any number of ranks and any batch size.

    python examples/evaluate.py runs/evaluation --batch-size 16
    python -m torch.distributed.run --nproc-per-node 2 examples/evaluate.py runs/evaluation --batch-size 16

It evaluates in parts and saves after each. Started again, it continues where it stopped; the batch size and the number of ranks may change.
"""

import argparse
import os
import pydoc_data.topics
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

import trainfold
from trainfold import metrics as M

CONTEXT, WINDOWS, PART_STEPS = 32, 500, 5
SUITE: M.Suite = {
    "loss": M.Ratio(),
    "perplexity": M.Perplexity(),
    "top-5 accuracy": M.TopK(5),
    "accuracy by position": M.PositionAccuracy(),
}


@final
class CausalLM(nn.Module):
    """Bytes in, logits of the next byte out: embedding, one block of causal attention, head."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """int64[b, t] to float[b, t, 256]."""
        hidden = self.embed(x) + self.position.weight[: x.shape[1]]
        b, t, width = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, width)))
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_windows() -> torch.Tensor:
    """Return English text that every Python has, as windows of bytes: uint8[WINDOWS, CONTEXT + 1]."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)[:WINDOWS]


def main(run: Path, batch_size: int) -> None:
    """Evaluate to the end, from the current position of the run."""
    ranks: trainfold.ranks.Collectives = trainfold.SingleProcess()
    if "RANK" in os.environ:  # started by torchrun
        torch.distributed.init_process_group("gloo")
        ranks = trainfold.TorchCollectives()
    torch.manual_seed(0)
    model, windows = CausalLM(), make_windows()

    def forward(batch: torch.Tensor) -> dict[str, Any]:
        logits, wanted = model(batch[:, :-1].long()), batch[:, 1:].long()
        nats = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        hits = logits.argmax(-1) == wanted
        return {
            "loss": (nats, nats.numel()),
            "perplexity": (nats, nats.numel()),
            "top-5 accuracy": (logits, wanted),
            "accuracy by position": (hits, torch.ones_like(hits)),
        }

    # the state of an evaluation: the tally of the metrics, and the position in the samples
    fresh = trainfold.TrainState(trainer=trainfold.states.make_progress())
    plan = trainfold.plan(run, like=fresh)
    is_fresh = isinstance(plan, trainfold.Refusal) and plan.finds_nothing
    # components that `fresh` lacks are loaded as they were saved
    state = fresh if is_fresh else trainfold.load(run, like=fresh, collectives=ranks)
    part, tally = state.trainer.step if state.trainer else 0, state.extra.get("tally")
    cursor = trainfold.evaluation.make_eval_cursor(
        len(windows), global_batch_size=batch_size, after=state.extra.get("cursor")
    )
    if ranks.rank == 0:
        print(f"from sample {cursor.next_index} of {cursor.length}", flush=True)

    while not cursor.is_done:
        batches = trainfold.evaluation.eval_batches(
            cursor, lambda at: windows[at.start : at.stop], collectives=ranks, limit=PART_STEPS
        )
        result = trainfold.evaluate(forward, batches, SUITE, collectives=ranks, start=tally)
        cursor, tally, part = batches.after, result.tally, part + 1
        if ranks.rank == 0:  # the result is the same on every rank
            extra = {"tally": tally, "cursor": cursor}
            found = trainfold.TrainState(trainer=trainfold.states.make_progress(step=part), extra=extra)
            trainfold.save(found, run, collectives=trainfold.SingleProcess())
            print(f"{cursor.next_index} samples: loss {result['loss']:.6f}, complete: {result.complete}", flush=True)

    if ranks.rank == 0:
        for name, value in trainfold.evaluation.evaluation_of(
            SUITE, tally or trainfold.evaluation.no_tally(SUITE)
        ).items():
            shown = value.hex() if isinstance(value, float) else [round(each, 3) for each in value[:4]]
            print(f"{name}: {shown}")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluate a model in parts, on one process or several.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    main(options.run, options.batch_size)

"""The held-out loss at three batch sizes: what the aggregation decides, and what the model's own kernels do."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch.nn import functional

from trainfold.adapters.cli.demo.corpus import Corpus, as_batch
from trainfold.adapters.cli.demo.model import GPT
from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.core.evaluate.suite import Suite
from trainfold.core.metrics.ratio import Perplexity, Ratio
from trainfold.core.metrics.topk import TopK
from trainfold.core.state.state import TrainState
from trainfold.core.step.bind import bind_model

BATCH_SIZES = (1, 7, 64)
SUITE: Suite = {"loss": Ratio(), "perplexity": Perplexity(), "top-5 accuracy": TopK(5)}


@final
@attrs.frozen
class HeldOutLoss:
    """What one batch size gives, as the bits of float64 in hex.

    Attributes:
        results: of the suite, by name, the model called with batches of this size.
        kept: the loss from values for each byte that were computed once, put into batches of this size.
        means: the mean of the means of batches, from the same values.
        float32: their sum in float32, over their number.
    """

    results: Mapping[str, str]
    kept: str
    means: str
    float32: str


@final
@attrs.frozen
class Measurement:
    """The held-out text, measured.

    Attributes:
        loss: nats for each byte, the model called with the largest batches.
        sizes: what each batch size gives, as text for JSON's sake.
        moved: values for single bytes that the model's kernels round differently in the smallest batches.
        values: how many there are.
    """

    loss: float
    sizes: Mapping[str, HeldOutLoss]
    moved: int
    values: int


def measure(state: TrainState, model: GPT, corpus: Corpus) -> Measurement:
    """Evaluate a state on the held-out text, without dropout, at each of the batch sizes.

    Args:
        state: its parameters are used.
        model: their structure.
        corpus: the text.
    """
    bound = bind_model(model, state)
    seen: dict[int, torch.Tensor] = {}
    sizes, loss = {}, 0.0
    for size in sorted(BATCH_SIZES, reverse=True):
        kept: list[torch.Tensor] = []

        def forward(windows: torch.Tensor, kept: list[torch.Tensor] = kept) -> dict[str, Any]:
            batch = as_batch(windows)
            logits, wanted = bound(batch["x"]).flatten(0, 1), batch["y"].flatten()
            nats = functional.cross_entropy(logits, wanted, reduction="none")
            kept.append(nats)
            return {
                "loss": (nats, nats.numel()),
                "perplexity": (nats, nats.numel()),
                "top-5 accuracy": (logits, wanted),
            }

        found = evaluate(forward, torch.split(corpus.heldout, size), SUITE)
        seen[size] = torch.cat(kept)
        loss = loss or float(found["loss"])
        once = torch.split(seen[max(BATCH_SIZES)], size * corpus.heldout[0, 1:].numel())
        sizes[str(size)] = HeldOutLoss(
            results={name: float(value).hex() for name, value in found.items()},
            kept=_exact(once).hex(),
            means=statistics.fmean(float(part.mean()) for part in once).hex(),
            float32=_in_float32(once).hex(),
        )
    moved = int((seen[min(BATCH_SIZES)] != seen[max(BATCH_SIZES)]).sum())
    ordered = {str(size): sizes[str(size)] for size in BATCH_SIZES}
    return Measurement(loss, ordered, moved, len(seen[max(BATCH_SIZES)]))


def _exact(parts: Sequence[torch.Tensor]) -> float:
    found = evaluate(lambda part: {"loss": (part, part.numel())}, parts, {"loss": Ratio()})
    return float(found["loss"])


def _in_float32(parts: Sequence[torch.Tensor]) -> float:
    total = torch.zeros(())
    for part in parts:
        total += part.sum()
    return float(total / sum(map(len, parts)))

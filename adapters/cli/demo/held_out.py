"""Measures the held-out loss at three batch sizes: the effect of aggregation, and that of the model's own kernels."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch.nn import functional

from trainfold.adapters.cli.demo.corpus import Corpus, as_batch
from trainfold.adapters.cli.demo.model import GPT
from trainfold.adapters.evaluation.evaluate import evaluate
from trainfold.backends.ranks.in_process import SingleProcess
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
    """The results with one batch size, as the bits of float64 in hex.

    Attributes:
        results: the results of the suite by name, if the model is called with batches of this size.
        kept: the loss, if stored values for each byte are aggregated in batches of this size.
        means: the mean of the batch means of the same values.
        float32: the sum of the same values in float32, divided by their number.
    """

    results: Mapping[str, str]
    kept: str
    means: str
    float32: str


@final
@attrs.frozen
class Measurement:
    """The model, measured on the held-out text.

    Attributes:
        loss: nats per byte, with the largest batches.
        sizes: the results with each batch size; the keys are text, as in JSON.
        moved: the number of values, one per byte, that the model's kernels round differently in the smallest batches.
        values: the number of all values.
    """

    loss: float
    sizes: Mapping[str, HeldOutLoss]
    moved: int
    values: int


def held_out_losses(state: TrainState, model: GPT, corpus: Corpus) -> Measurement:
    """Evaluate a state on the held-out text, without dropout, with each of the batch sizes.

    Args:
        state: the parameters to use.
        model: the module to bind them to.
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

        found = evaluate(forward, torch.split(corpus.heldout, size), SUITE, collectives=SingleProcess())
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
    found = evaluate(lambda part: {"loss": (part, part.numel())}, parts, {"loss": Ratio()}, collectives=SingleProcess())
    return float(found["loss"])


def _in_float32(parts: Sequence[torch.Tensor]) -> float:
    total = torch.zeros(())
    for part in parts:
        total += part.sum()
    return float(total / sum(map(len, parts)))

"""The law of metrics: `batch_invariant`, for a metric and the values that it will see."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics.metric import Metric
from trainfold.properties.accumulators import difference_of, shown
from trainfold.properties.differences import LawBroken

__all__ = ["batch_invariant"]

_MOST_RANKS = 8


def batch_invariant(metric: Metric, values: Any, *, max_examples: int = 100) -> None:
    """Batch invariance: no batch size, order or number of ranks changes a bit of a metric (Q01).

    The rows of the values are shuffled, cut into batches, some of them empty, and dealt out to 1 to 8 ranks, some of which may
    get nothing; each rank observes its batches and the ranks are merged in some order. The result and the accumulator have to be
    those of all rows in one batch. The first examples are batches of one row in order, and of one row in the opposite order.

    Args:
        metric: any metric.
        values: what ``observe`` gets after the accumulator: a tensor, or a tuple of tensors with the same size in dimension 0.
        max_examples: how many ways to cut and deal; they are the same ones in each run.

    Raises:
        LawBroken: with the sizes of the batches of each rank, and both results or the leaf that differs.
        InvalidArgument: for values that cannot be cut.

    Examples:
        >>> from trainfold.core.metrics.total import Mean
        >>> batch_invariant(Mean(), torch.tensor([1e30, 1.0, -1e30, 0.1]), max_examples=10)
    """
    outputs = values if isinstance(values, tuple) else (values,)
    sizes = {len(output) if isinstance(output, torch.Tensor) and output.dim() else None for output in outputs}
    if len(sizes) != 1 or None in sizes:
        raise InvalidArgument(
            "values",
            expected="tensors with the same size in dimension 0",
            found=[tuple(output.shape) if isinstance(output, torch.Tensor) else output for output in outputs],
            mend="give the outputs for a batch with all samples",
        )
    whole = metric.merge(metric.zero(), metric.observe(metric.zero(), *outputs))
    wanted = shown(metric.result(whole))
    for ranks in _plans(len(outputs[0]), max_examples):
        accs = []
        for batches in ranks:
            acc = metric.zero()
            for rows in batches:
                acc = metric.observe(acc, *(output[rows.to(output.device)] for output in outputs))
            accs.append(acc)
        found = metric.zero()
        for acc in accs:
            found = metric.merge(found, acc)
        plan = [[len(rows) for rows in batches] for batches in ranks]
        doing = f"batches of {plan} rows, a list for each rank"
        if shown(metric.result(found)) != wanted:
            raise LawBroken("batch invariance", "result", f"{shown(metric.result(found))} against {wanted}; {doing}")
        if difference := difference_of(found, whole):
            raise LawBroken("batch invariance", "accumulator", f"{difference}; {doing}")


def _plans(length: int, max_examples: int) -> Iterator[Sequence[Sequence[torch.Tensor]]]:
    """For each example, for each rank, for each batch, its rows."""
    rows = torch.arange(length)
    for example in range(max_examples):
        if example < 2:
            yield [list(torch.tensor_split(rows.flip(0) if example else rows, max(1, length)))]
            continue
        generator = torch.Generator().manual_seed(example)
        cuts = torch.randint(length + 1, (_draw(generator, 2 * _MOST_RANKS),), generator=generator).sort().values
        batches = torch.tensor_split(rows[torch.randperm(length, generator=generator)], cuts)
        ranks: list[list[torch.Tensor]] = [[] for _ in range(1 + _draw(generator, _MOST_RANKS))]
        for batch in batches:
            ranks[_draw(generator, len(ranks))].append(batch)
        yield ranks


def _draw(generator: torch.Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=generator))

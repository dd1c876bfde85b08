"""The law of metrics: `batch_invariant` checks it for a metric, with example values."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainfold.core.errors import InvalidArgument
from trainfold.core.evaluate.suite import arguments_of
from trainfold.core.metrics.metric import Metric
from trainfold.properties.batches import OutputsOf, fresh, need_rows, row_count, taken
from trainfold.properties.differences import LawBroken
from trainfold.properties.metrics.accumulators import difference_of, result_text

__all__ = ["batch_invariant"]

_MOST_RANKS = 8


def batch_invariant(
    metric: Metric, values: Any, *, outputs_of: OutputsOf | None = None, max_examples: int = 100
) -> None:
    """Batch invariance: no batch size, order or number of ranks changes a bit of a metric.

    The rows of the values are shuffled, cut into batches, some of them empty, and dealt to 1 to 8 ranks, some of which may get
    none. Each rank observes its batches, and the ranks are merged in order. The result and the accumulator must equal those of
    all rows in one batch. The first two examples are batches of one row, in order and in reverse order.

    Args:
        metric: any metric.
        values: the argument of ``observe`` after the accumulator, for all samples in one batch, or a tuple of several: tensors
            with the same size in dimension 0, two rows or more, also in dicts and lists.
        outputs_of: maps rows of the values to the arguments of ``observe``: for outputs that cannot be cut themselves.
        max_examples: how many ways to cut and deal, one or more; they are the same in each run.

    Raises:
        LawBroken: with the sizes of the batches of each rank, and both results or the leaf that differs.
        InvalidArgument: for values that cannot be cut, and for ``max_examples`` below 1.

    Examples:
        >>> from trainfold.metrics import Mean
        >>> batch_invariant(Mean(), torch.tensor([1e30, 1.0, -1e30, 0.1]), max_examples=10)
    """
    need_rows("values", [values])
    if max_examples < 1:
        raise InvalidArgument(
            "max_examples",
            expected="one or more",
            found=max_examples,
            fix="pass two or more: the first two keep the order of the rows",
        )

    def observed(acc: Any, rows: slice | torch.Tensor) -> Any:
        part = fresh(taken(values, rows))
        return metric.observe(acc, *arguments_of(part if outputs_of is None else outputs_of(part)))

    whole = metric.merge(metric.zero(), observed(metric.zero(), slice(None)))
    wanted = result_text(metric.result(whole))
    for ranks in _plans(row_count(values) or 0, max_examples):
        accs = []
        for batches in ranks:
            acc = metric.zero()
            for rows in batches:
                acc = observed(acc, rows)
            accs.append(acc)
        found = metric.zero()
        for acc in accs:
            found = metric.merge(found, acc)
        plan = [[len(rows) for rows in batches] for batches in ranks]
        doing = f"batches of {plan} rows, a list for each rank"
        if result_text(metric.result(found)) != wanted:
            raise LawBroken(
                "batch invariance", "result", f"{result_text(metric.result(found))} against {wanted}; {doing}"
            )
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

"""`evaluate`: metrics over batches and ranks, the same bits for any batch size, order and number of ranks (Q01-Q12)."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, final

import attrs
import torch

from trainfold.adapters.in_step import Forward, Share, everywhere, has_more, tally_in_step, tally_of
from trainfold.adapters.undisturbed import modules_of, undisturbed
from trainfold.backends.collectives import SingleProcess
from trainfold.core import tree
from trainfold.core.codec import digest_of, leaf_digest
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.evaluation import Evaluation, evaluation_of
from trainfold.core.metrics.metric import Metric
from trainfold.core.scalars import shown
from trainfold.core.suite import Suite, Tally, check_suite, merge_tallies, no_tally
from trainfold.core.tally_wire import Layout, check_layouts, layout_of, pack, unpack
from trainfold.core.world import Collectives


@final
@attrs.frozen
class _Report:
    """What a rank tells the others before the numbers."""

    layout: Layout = ()
    batches: int = 0
    complete: bool = True
    start: str = ""


def evaluate(  # noqa: PLR0913 what is rare is named
    forward: Forward,
    batches: Iterable[Any],
    suite: Mapping[str, Metric],
    *,
    collectives: Collectives | None = None,
    steps: int | None = None,
    start: Tally | None = None,
    modules: Iterable[torch.nn.Module] = (),
) -> Evaluation:
    """Measure a model over all batches of all ranks.

    Law: where what ``forward`` returns for a sample does not depend on the other samples of its batch, no batch size, order,
    number of ranks or interruption changes a bit of the result. (Whether it depends on them is up to the model's kernels: a
    matrix product may round differently for another number of rows.)

    Modules that ``forward`` is, is bound to, has closed over or names are put into evaluation mode; their modes, the grad mode,
    the random streams and the position of a stateful loader are put back in every case.

    Args:
        forward: takes a batch and returns, for each metric that the batch says something of, the arguments of its ``observe``:
            ``{"loss": (numerator, denominator)}``, tensors of any shape or numbers. It runs without gradients.
        batches: this rank's; may be empty, or of another length on each rank. If it has an attribute ``complete`` that is
            False afterwards, as a `time_limit` has, the evaluation is partial.
        suite: the metrics by name, the same on every rank.
        collectives: the ranks; None: this process is all there is.
        steps: for a forward that itself communicates (FSDP, a pipeline): how many times every rank calls it, the same number on
            every rank. A rank with fewer batches repeats its last one, or has one from another rank; what that returns is not
            counted. A rank with more batches leaves the rest, and the evaluation is partial.
        start: go on from the tally of an evaluation that was interrupted, the same on every rank.
        modules: further ones to put into evaluation mode, which ``forward`` reaches in a way that cannot be seen.

    Returns:
        The results, the same on every rank; ``{}`` when no rank saw a batch.

    Raises:
        RankFailed: on the ranks that did not fail, when one did: the failed rank raises its own error.
        RanksDisagree: on every rank, when suites, ``steps`` or ``start`` differ.
        InvalidArgument: for a suite that is none, and for what ``forward`` returned under a name that is not in the suite.

    Examples:
        >>> from trainfold import metrics as M
        >>> def forward(batch):
        ...     return {"accuracy": (batch > 0, batch.numel())}
        >>> whole = torch.tensor([1, -1, 1, 1])
        >>> evaluate(forward, [whole], {"accuracy": M.Ratio()}), evaluate(forward, whole.split(3), {"accuracy": M.Ratio()})
        ({'accuracy': 0.75}, {'accuracy': 0.75})
    """
    ranks: Collectives = SingleProcess() if collectives is None else collectives
    with ExitStack() as stack:

        def begin() -> Share:
            checked = check_suite(suite)
            stack.enter_context(undisturbed([*modules_of(forward), *modules], batches))
            return Share(forward, checked, iter(batches))

        def alone() -> tuple[tuple[Suite, Tally], _Report]:
            share = begin()
            return reported(share, tally_of(share))

        def reported(share: Share, tally: Tally, *, cut: bool = False) -> tuple[tuple[Suite, Tally], _Report]:
            tally = merge_tallies(share.suite, no_tally(share.suite), tally)  # on the CPU, with all carries done
            layout = layout_of(share.suite, tally, world_size=ranks.world_size)
            complete = not cut and bool(getattr(batches, "complete", True))
            return (share.suite, tally), _Report(layout, tally.batches, complete, _digest(share.suite, start))

        if steps is None:
            (metrics, tally), reports = everywhere(ranks, alone)
        else:
            share, seen, is_last_mine, failure = tally_in_step(begin, ranks, steps=steps)

            def together() -> tuple[tuple[Suite, Tally], _Report]:
                if failure is not None:
                    raise failure
                may_look = is_last_mine and share.batches is not batches  # an iterator loses what is looked at
                return reported(share, seen, cut=may_look and has_more(share))

            (metrics, tally), reports = everywhere(ranks, together)
    check_layouts([report.layout for report in reports])
    _check_starts([report.start for report in reports])
    layouts = [report.layout for report in reports]
    (summed,) = ranks.all_sum([pack(metrics, tally, layouts, ranks.rank)])
    tally = unpack(metrics, tally, layouts, summed, batches=sum(report.batches for report in reports))
    if start is not None:
        tally = merge_tallies(metrics, start, tally)
    return evaluation_of(metrics, tally, complete=all(report.complete for report in reports))


def _digest(metrics: Suite, start: Tally | None) -> str:
    if start is None:
        return ""
    if not isinstance(start, Tally) or start.accumulators.keys() != metrics.keys():
        raise InvalidArgument(
            "start",
            expected=f"the tally of an evaluation of {', '.join(metrics)}",
            found=", ".join(start.accumulators) if isinstance(start, Tally) else shown(start),
            mend="give the same suite as to the evaluation that was interrupted, and its .tally",
        )
    leaves = [leaf.cpu().contiguous() for leaf in tree.leaves(start.accumulators)]
    texts = [f"{tuple(leaf.shape)} {leaf_digest(leaf)}" for leaf in leaves]
    return digest_of("\n".join([*texts, str(start.batches)]).encode())


def _check_starts(starts: list[str]) -> None:
    for rank, start in enumerate(starts):
        if start != starts[0]:
            raise RanksDisagree(
                "start",
                expected="the same tally on every rank",
                found=f"rank {rank} has another than rank 0",
                mend="give the .tally of an evaluation by all ranks, which is the same on each",
            )

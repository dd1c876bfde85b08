"""`evaluate`: metrics over batches and ranks, the same bits for any batch size, order and number of ranks (Q01-Q12)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

import attrs
import torch

from trainfold.adapters.in_step import NOTHING, Forward, Share, everywhere, see_alone, see_in_step
from trainfold.adapters.undisturbed import communicate, modules_of, undisturbed
from trainfold.backends.collectives import SingleProcess
from trainfold.core import tree
from trainfold.core.codec import digest_of, leaf_digest
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.eval_cursor import DistributedEvalCursor
from trainfold.core.evaluation import Evaluation, evaluation_of
from trainfold.core.metrics.metric import Metric
from trainfold.core.scalars import shown
from trainfold.core.suite import Suite, Tally, check_suite, merge_tallies, no_tally, texts_of
from trainfold.core.tally_wire import Layout, check_layouts, layout_of, pack, unpack
from trainfold.core.world import Collectives


@final
@attrs.frozen
class _Opening:
    """What a rank tells the others before it begins."""

    steps: int | None
    communicates: bool
    has_batch: bool
    position: str
    start: str
    layout: Layout


@final
@attrs.frozen
class _Report:
    """What a rank tells the others before the numbers."""

    layout: Layout
    batches: int
    complete: bool


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
        steps: for a forward that itself communicates (a pipeline, tensor parallelism): how many times every rank calls it, the same
            number on every rank. A rank with fewer batches repeats its last one, or has one from another rank; what that returns
            is not counted. A rank with more leaves the rest (one is taken to know), and the evaluation is partial. Models under FSDP,
            DDP with buffers, and with DTensors are seen to communicate: without ``steps``, ranks ask each other before each call.
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

        def opened() -> tuple[Share, _Opening]:
            checked = check_suite(suite)
            _check_arguments(forward, steps)
            going_on = _digest(checked, start)
            found = [*modules_of(forward), *_modules_given(modules)]
            stack.enter_context(undisturbed(found, batches))
            iterator = _iterator(batches)
            first = next(iterator, NOTHING)
            layout = layout_of(checked, no_tally(checked), world_size=ranks.world_size)
            position = _position(batches, ranks)
            opening = _Opening(steps, communicate(found), first is not NOTHING, position, going_on, layout)
            return Share(forward, checked, iterator, first), opening

        share, openings = everywhere(ranks, opened)
        check_layouts([opening.layout for opening in openings])
        _check_same("steps", [opening.steps for opening in openings], "DistributedEvalCursor.steps is the same on each")
        _check_same("the position", [opening.position for opening in openings], "make one cursor, alike on each rank")
        _check_same("start", [opening.start for opening in openings], "give the .tally of an evaluation by all ranks")
        in_step = steps is not None or (ranks.world_size > 1 and any(opening.communicates for opening in openings))

        def reported() -> tuple[Tally, _Report]:
            tally = seen.tally if seen is not None else see_alone(share).tally
            if seen is not None and seen.failure is not None:
                raise seen.failure
            tally = merge_tallies(share.suite, no_tally(share.suite), tally)  # on the CPU, with all carries done
            layout = layout_of(share.suite, tally, world_size=ranks.world_size)
            complete = _is_complete(batches, start) and not (seen is not None and seen.has_more)
            return tally, _Report(layout, tally.batches, complete)

        having = [opening.has_batch for opening in openings]
        seen = see_in_step(share, ranks, steps=steps, having=having) if in_step else None
        tally, reports = everywhere(ranks, reported)
    layouts = [report.layout for report in reports]
    check_layouts(layouts)
    (summed,) = ranks.all_sum([pack(share.suite, tally, layouts, ranks.rank)])
    tally = unpack(share.suite, tally, layouts, summed, batches=sum(report.batches for report in reports))
    if start is not None:
        tally = merge_tallies(share.suite, start, tally)
    complete = all(report.complete for report in reports)
    return evaluation_of(share.suite, attrs.evolve(tally, complete=complete))


def _iterator(batches: Any) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError as error:
        raise InvalidArgument(
            "batches", expected="batches", found=shown(batches), mend="give a loader, or a list"
        ) from error


def _check_arguments(forward: object, steps: object) -> None:
    if not callable(forward):
        raise InvalidArgument(
            "forward",
            expected="a function of a batch",
            found=shown(forward),
            mend="return {'loss': (numerator, denominator)} from it",
        )
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InvalidArgument("steps", expected="a number of calls, >= 1", found=shown(steps), mend="or leave it out")


def _modules_given(modules: object) -> list[torch.nn.Module]:
    given: list[Any] = [modules]
    if isinstance(modules, Iterable) and not isinstance(modules, torch.nn.Module):
        given = list(modules)
    if not all(isinstance(module, torch.nn.Module) for module in given):
        raise InvalidArgument("modules", expected="modules", found=shown(modules), mend="list them: modules=[model]")
    return given


def _position(batches: object, ranks: Collectives) -> str:
    """Where batches of a cursor begin, as text; the same on every rank."""
    cursor = getattr(batches, "cursor", None)
    if not isinstance(cursor, DistributedEvalCursor):
        return ""
    of = (getattr(batches, "rank", 0), getattr(batches, "world_size", 1))
    if of != (ranks.rank, ranks.world_size):
        raise InvalidArgument(
            "batches",
            expected=f"those of rank {ranks.rank} of {ranks.world_size}",
            found=f"those of rank {of[0]} of {of[1]}",
            mend="give the same collectives to eval_batches and to evaluate",
        )
    return f"{cursor}, {getattr(batches, 'steps', None)} steps"


def _is_complete(batches: object, start: Tally | None) -> bool:
    cursor = getattr(batches, "cursor", None)
    begins_late = isinstance(cursor, DistributedEvalCursor) and cursor.next_index > 0 and start is None
    return not begins_late and bool(getattr(batches, "complete", True))


def _digest(suite: Suite, start: Tally | None) -> str:
    if start is None:
        return ""
    wanted = texts_of(suite)
    found = dict(start.metrics) if isinstance(start, Tally) else {}
    if found != wanted:
        differs = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise InvalidArgument(
            "start",
            expected="; ".join(f"{name}: {wanted.get(name, 'absent')}" for name in differs),
            found="; ".join(f"{name}: {found.get(name, 'absent')}" for name in differs) if found else shown(start),
            mend="give the same suite as to the evaluation that was interrupted, and its .tally",
        )
    leaves = [leaf.cpu().contiguous() for leaf in tree.leaves(start.accumulators)]
    texts = [f"{tuple(leaf.shape)} {leaf_digest(leaf)}" for leaf in leaves]
    return digest_of("\n".join([*texts, str(start.batches)]).encode())


def _check_same(what: str, told: Sequence[object], mend: str) -> None:
    for rank, each in enumerate(told):
        if each != told[0]:
            raise RanksDisagree(
                what,
                expected=f"the same on every rank; rank 0 has {told[0] or 'none'}",
                found=f"rank {rank}: {each or 'none'}",
                mend=mend,
            )

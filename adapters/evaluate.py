"""`evaluate`: metrics over batches and ranks, the same bits for any batch size, order and number of ranks (Q01-Q12)."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

import attrs
import torch

from trainfold.adapters.in_step import NOTHING, Agreed, Forward, Share, everywhere, see_alone, see_in_step
from trainfold.adapters.reach import reachable
from trainfold.adapters.undisturbed import communicate, modules_of, undisturbed
from trainfold.backends.collectives import SingleProcess
from trainfold.backends.time_limit import TimeLimit
from trainfold.core import tree
from trainfold.core.codec import digest_of, leaf_digest
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.eval_cursor import DistributedEvalCursor, EvalBatches
from trainfold.core.evaluation import Evaluation, evaluation_of
from trainfold.core.metrics.metric import Metric
from trainfold.core.scalars import shown
from trainfold.core.suite import Suite, Tally, check_suite, check_tally, merge_tallies, no_tally
from trainfold.core.tally_wire import Layout, check_layouts, layout_of, pack, unpack
from trainfold.core.world import Collectives


@final
@attrs.frozen
class _Given:
    """What was said beside forward, batches and suite."""

    steps: int | None
    start: Tally | None
    modules: object


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
    modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
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
    try:
        return _evaluate(forward, batches, suite, ranks, _Given(steps, start, modules))
    except Agreed as agreed:
        raise agreed.error from agreed.error.__cause__
    except BaseException as error:
        ranks.fail(error)
        raise


def _evaluate(forward: Forward, batches: Any, suite: object, ranks: Collectives, given: "_Given") -> Evaluation:
    with ExitStack() as stack:

        def opened() -> tuple[tuple[Share, list[EvalBatches[Any] | TimeLimit[Any]]], _Opening]:
            checked = check_suite(suite)
            _check_arguments(forward, given.steps)
            found = [*modules_of(forward), *_modules_given(given.modules)]
            limits: list[Any] = reachable(batches, (EvalBatches, TimeLimit))
            going_on = _digest(checked, given.start, limits)
            position = _position(limits, ranks)
            stack.enter_context(undisturbed(found, batches))
            iterator = _iterator(batches)
            first = next(iterator, NOTHING)
            layout = layout_of(checked, no_tally(checked), world_size=ranks.world_size)
            opening = _Opening(given.steps, communicate(found), first is not NOTHING, position, going_on, layout)
            return (Share(forward, checked, iterator, first), limits), opening

        (share, limits), openings = everywhere(ranks, opened)
        _check_openings(openings)
        in_step = given.steps is not None or (
            ranks.world_size > 1 and any(opening.communicates for opening in openings)
        )
        having = [opening.has_batch for opening in openings]
        seen = see_in_step(share, ranks, steps=given.steps, having=having) if in_step else None

        def reported() -> tuple[Tally, _Report]:
            mine = see_alone(share) if seen is None else seen
            if mine.failure is not None:
                raise mine.failure
            tally = merge_tallies(share.suite, no_tally(share.suite), mine.tally)  # on the CPU, with all carries done
            layout = layout_of(share.suite, tally, world_size=ranks.world_size)
            whole = [limit.complete for limit in limits] or [getattr(batches, "complete", True)]
            complete = all(whole) and not mine.has_more and _follows(given.start, limits)
            return tally, _Report(layout, tally.batches, complete)

        tally, reports = everywhere(ranks, reported)
    layouts = [report.layout for report in reports]
    _agreeing(lambda: check_layouts(layouts))
    (summed,) = ranks.all_sum([pack(share.suite, tally, layouts, ranks.rank)])
    tally = unpack(share.suite, tally, layouts, summed, batches=sum(report.batches for report in reports))
    if given.start is not None:
        tally = merge_tallies(share.suite, given.start, tally)
    complete = all(report.complete for report in reports)
    reached = max((_after(limit) for limit in limits), default=-1)
    return evaluation_of(share.suite, attrs.evolve(tally, complete=complete, next_index=reached))


def _check_openings(openings: Sequence[_Opening]) -> None:
    _agreeing(lambda: check_layouts([opening.layout for opening in openings]))
    for what, told, mend in (
        ("steps", [opening.steps for opening in openings], "DistributedEvalCursor.steps is the same on each"),
        ("the position", [opening.position for opening in openings], "make one cursor, alike on each rank"),
        ("start", [opening.start for opening in openings], "give the .tally of an evaluation by all ranks"),
    ):
        _agreeing(functools.partial(_check_same, what, told, mend))


def _agreeing(check: Callable[[], None]) -> None:
    """A check of what all ranks were told: every rank comes to the same end."""
    try:
        check()
    except RanksDisagree as error:
        raise Agreed(error) from error


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


def _position(limits: Sequence[Any], ranks: Collectives) -> str:
    """Where batches of cursors begin, as text; the same on every rank."""
    for batches in limits:
        of = (getattr(batches, "rank", ranks.rank), getattr(batches, "world_size", ranks.world_size))
        if of != (ranks.rank, ranks.world_size):
            raise InvalidArgument(
                "batches",
                expected=f"those of rank {ranks.rank} of {ranks.world_size}",
                found=f"those of rank {of[0]} of {of[1]}",
                mend="give the same collectives to eval_batches and to evaluate",
            )
    return "; ".join(
        f"{cursor}, {batches.steps} steps" for batches in limits if (cursor := _cursor(batches)) is not None
    )


def _cursor(batches: Any) -> DistributedEvalCursor | None:
    cursor = getattr(batches, "cursor", None)
    return cursor if isinstance(cursor, DistributedEvalCursor) else None


def _after(batches: Any) -> int:
    try:
        return int(batches.after.next_index)
    except AttributeError:  # batches without a cursor, or cut where nobody knows
        return -1


def _follows(start: Tally | None, limits: Sequence[Any]) -> bool:
    """Whether nothing lies between what was seen before and the first of these batches."""
    cursors = [cursor for batches in limits if (cursor := _cursor(batches)) is not None]
    if start is None or start.batches == 0:
        return all(cursor.next_index == 0 for cursor in cursors)
    return start.complete or (start.next_index >= 0 and bool(cursors))


def _digest(suite: Suite, start: Tally | None, limits: Sequence[Any]) -> str:
    if start is None:
        return ""
    check_tally("start", suite, start)
    for cursor in map(_cursor, limits):
        if cursor is not None and start.batches and cursor.next_index != start.next_index:
            reached = f"sample {start.next_index}" if start.next_index >= 0 else "no known position"
            raise InvalidArgument(
                "start",
                expected=f"a tally that reached sample {cursor.next_index}, where the batches begin",
                found=f"one that reached {reached}",
                mend="begin where it ended: make_eval_cursor(..., after=the cursor that was saved with it)",
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

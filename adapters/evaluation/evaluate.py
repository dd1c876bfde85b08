"""`evaluate`: metrics over batches and ranks, the same bits for any batch size, order and number of ranks."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, final

import attrs
import torch

from trainfold.adapters.evaluation.batch_source import BatchSource, begin_of, drawn_from, says_whole, source_of
from trainfold.adapters.evaluation.chunks import Chunks, check_chunk
from trainfold.adapters.evaluation.eval_mode import communicate, in_eval_mode, modules_of
from trainfold.adapters.evaluation.generators import close_generators
from trainfold.adapters.evaluation.lockstep import (
    NOTHING,
    Agreed,
    Ahead,
    Forward,
    Share,
    everywhere,
    raise_again,
    see_alone,
    see_in_step,
)
from trainfold.backends.ranks.launcher import world_given
from trainfold.core import tree
from trainfold.core.checks import count
from trainfold.core.digest import digest_of
from trainfold.core.errors import InvalidArgument, RanksDisagree
from trainfold.core.evaluate.combine import Layout, check_same_suite, layout_of, tally_of, vector_of
from trainfold.core.evaluate.coverage import Span, span_of, together
from trainfold.core.evaluate.evaluation import Evaluation, evaluation_of
from trainfold.core.evaluate.suite import Suite, Tally, check_suite, check_tally, merge_tallies, no_tally
from trainfold.core.format.codec import leaf_digest
from trainfold.core.json_values import shown
from trainfold.core.layout.world import Collectives
from trainfold.core.metrics.metric import Metric

T = TypeVar("T")


@final
@attrs.frozen
class _Given:
    """The arguments beside forward, batches and suite."""

    steps: int | None
    start: Tally | None
    modules: object
    chunk: int | None


@final
@attrs.frozen
class _Opening:
    """What a rank sends to the others before it starts."""

    steps: int | None
    chunk: int | None
    communicates: bool
    has_batch: bool
    position: str
    start: str
    layout: Layout


@final
@attrs.frozen
class _Report:
    """What a rank sends to the others before the numbers."""

    layout: Layout
    batches: int
    span: Span


def evaluate(  # noqa: PLR0913 what is rare is named
    forward: Forward,
    batches: Iterable[Any],
    suite: Mapping[str, Metric],
    *,
    collectives: Collectives | None = None,
    steps: int | None = None,
    start: Tally | None = None,
    chunk: int | None = None,
    modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
) -> Evaluation:
    """Measure a model over all batches of all ranks.

    Law: if what ``forward`` returns for a sample does not depend on the other samples of its batch, no batch size, order, number of
    ranks or interruption changes a bit of the result. The kernels of most models round a sample differently in a batch of another
    size: pass ``chunk``, and the law holds for every forward that repeats itself.

    Modules that ``forward`` is, is bound to, closes over or names, directly or through helpers, are put into evaluation mode. Their
    modes, the grad mode, the random streams and the position of a stateful loader are always put back; the loader has to be
    ``batches`` itself, not one inside a generator or a map. A generator that is left before its end, by ``steps`` or an error, is
    closed.

    Args:
        forward: takes a batch and returns the arguments of ``observe`` for each metric that the batch has values for:
            ``{"loss": (numerator, denominator)}``, tensors of any shape or numbers. It runs without gradients.
        batches: the batches of this rank; may be empty, or of another length on each rank. The evaluation is partial if they have
            an attribute ``complete`` that is False afterwards, as a `time_limit` has, or if batches of `eval_batches`, also
            behind a wrapper, were not all drawn and evaluated, each once.
        suite: the metrics by name, the same on every rank.
        collectives: the ranks; None for a single process, which is refused if torch.distributed or a launcher has several ranks:
            pass ``SingleProcess()`` if this rank evaluates alone on purpose.
        steps: for a forward that itself communicates (a pipeline, tensor parallelism): how often every rank calls it, the same on
            every rank. A rank with fewer batches repeats its last one, or one from another rank, and does not count the result.
            A rank with more leaves the rest, after drawing one more to find out, and the evaluation is partial. Models under
            FSDP, DDP with buffers, and models with DTensors are known to communicate: without ``steps``, ranks ask each other
            before each call.
        start: the tally of an interrupted evaluation to continue, the same on every rank.
        chunk: the forward sees the samples ``[k * chunk, (k + 1) * chunk)`` together, and the last ones as a shorter chunk,
            whatever the batches and the ranks. The index of a sample is its place in the batches, or that of an eval cursor;
            several ranks need ``eval_batches(..., chunk=...)``. ``steps`` counts chunks then. None to pass the batches as they are.
        modules: further modules to put into evaluation mode, which `evaluate` does not find behind ``forward``. If it finds none
            with parameters, a warning names what it did not look into.

    Returns:
        The results, the same on every rank; ``{}`` when no rank saw a batch.

    Raises:
        RankFailed: on the ranks that did not fail, if one did; the failed rank raises its own error.
        RanksDisagree: on every rank, if suites, ``steps``, ``chunk``, positions or ``start`` differ.
        InvalidArgument: for several ranks without ``collectives``, an invalid suite, an output under a name that is not in the
            suite, tensors that are not plain memory (DTensors), batches that do not begin where ``start`` ended, and a ``chunk``
            that cannot be cut.
        InvalidBatch: with ``chunk``, for batches that are not made of tensors, arrays and lists with a value for each sample.

    Examples:
        >>> from trainfold import metrics as M
        >>> def forward(batch):
        ...     return {"accuracy": (batch > 0, batch.numel())}
        >>> whole = torch.tensor([1, -1, 1, 1])
        >>> evaluate(forward, [whole], {"accuracy": M.Ratio()}), evaluate(forward, whole.split(3), {"accuracy": M.Ratio()})
        ({'accuracy': 0.75}, {'accuracy': 0.75})
    """
    ranks = world_given(collectives, os.environ, where="evaluate.collectives")
    try:
        return _evaluate(forward, batches, suite, ranks, _Given(steps, start, modules, chunk))
    except Agreed as agreed:
        error = agreed.error
    except BaseException as interrupt:
        ranks.fail(interrupt)
        raise
    try:
        raise_again(error)
    finally:
        del error


def _evaluate(forward: Forward, batches: Any, suite: object, ranks: Collectives, given: "_Given") -> Evaluation:
    with ExitStack() as stack:

        def opened() -> tuple[tuple[Share, BatchSource, Chunks | None], _Opening]:
            checked = check_suite(suite)
            _check_arguments(forward, given.steps)
            found = modules_of(forward, _modules_given(given.modules))
            source = source_of(batches)
            going_on = _digest(checked, given.start)
            position = begin_of(source, given.start, ranks)
            check_chunk(given.chunk, source, given.start, world_size=ranks.world_size)
            stack.enter_context(in_eval_mode(found, batches, source.generators))
            iterator = _iterator(batches)
            stack.callback(close_generators, iterator)
            chunks = None if given.chunk is None else Chunks(source, iterator, given.chunk)
            share = Share(forward, checked, Ahead(iterator if chunks is None else chunks))
            layout = layout_of(checked, no_tally(checked), world_size=ranks.world_size)
            has_batch = share.batches.batch is not NOTHING
            opening = _Opening(given.steps, given.chunk, communicate(found), has_batch, position, going_on, layout)
            return (share, source, chunks), opening

        (share, source, chunks), openings = everywhere(ranks, opened)
        _check_openings(openings)
        in_step = given.steps is not None or (
            ranks.world_size > 1 and any(opening.communicates for opening in openings)
        )
        having = [opening.has_batch for opening in openings]
        in_steps = [see_in_step(share, ranks, steps=given.steps, having=having)] if in_step else []

        def reported() -> tuple[Tally, _Report]:
            mine = in_steps.pop() if in_step else see_alone(share)
            if mine.failure is not None:
                try:
                    raise_again(mine.failure)
                finally:
                    del mine
            tally = merge_tallies(share.suite, no_tally(share.suite), mine.tally)  # on the CPU, with all carries done
            layout = layout_of(share.suite, tally, world_size=ranks.world_size)
            if chunks is not None:
                chunks.check_order()
            span = span_of(
                drawn_from(source),
                start=given.start,
                seen=tally.batches,
                has_more=mine.has_more,
                is_whole=says_whole(source),
                cut=None if chunks is None else chunks.cut(tally.batches),
            )
            return tally, _Report(layout, tally.batches, span)

        tally, reports = everywhere(ranks, reported)
    layouts = [report.layout for report in reports]
    _agreeing(lambda: check_same_suite(layouts))
    (summed,) = ranks.all_sum([vector_of(tally, layouts, ranks.rank)])

    def ended() -> Evaluation:
        whole = tally_of(share.suite, tally, layouts, summed, batches=sum(report.batches for report in reports))
        if given.start is not None:
            whole = merge_tallies(share.suite, given.start, whole)
        next_index, complete = together([report.span for report in reports])
        seen = attrs.evolve(whole, complete=complete, next_index=next_index, chunk=given.chunk or 0)
        return evaluation_of(share.suite, seen)

    return _agreeing(ended)


def _check_openings(openings: Sequence[_Opening]) -> None:
    _agreeing(lambda: check_same_suite([opening.layout for opening in openings]))
    for what, values, fix in (
        ("steps", [opening.steps for opening in openings], "DistributedEvalCursor.steps is the same on each"),
        ("chunk", [opening.chunk for opening in openings], "pass the same chunk= on each"),
        ("the position", [opening.position for opening in openings], "make the same cursor on each rank"),
        ("start", [opening.start for opening in openings], "pass the .tally of an evaluation by all ranks"),
    ):
        _agreeing(functools.partial(_check_same, what, values, fix))


def _agreeing(work: Callable[[], T]) -> T:
    """Do work whose input is the same on all ranks, so that they all get the same result or the same error."""
    try:
        return work()
    except Exception as error:
        raise Agreed(error) from error


def _iterator(batches: Any) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError as error:
        raise InvalidArgument(
            "batches", expected="batches", found=shown(batches), fix="pass a loader, or a list"
        ) from error


def _check_arguments(forward: object, steps: object) -> None:
    if not callable(forward):
        raise InvalidArgument(
            "forward",
            expected="a function of a batch",
            found=shown(forward),
            fix="return {'loss': (numerator, denominator)} from it",
        )
    if steps is not None:
        count("steps", steps, expected="a number of calls, >= 1", fix="pass a number, or leave it out")


def _modules_given(modules: object) -> list[torch.nn.Module]:
    given: list[Any] = [modules]
    if isinstance(modules, Iterable) and not isinstance(modules, torch.nn.Module):
        given = list(modules)
    if not all(isinstance(module, torch.nn.Module) for module in given):
        raise InvalidArgument("modules", expected="modules", found=shown(modules), fix="list them: modules=[model]")
    return given


def _digest(suite: Suite, start: Tally | None) -> str:
    if start is None:
        return ""
    check_tally("start", suite, start)
    leaves = [leaf.cpu().contiguous() for leaf in tree.leaves(start.accumulators)]
    texts = [f"{tuple(leaf.shape)} {leaf_digest(leaf)}" for leaf in leaves]
    return digest_of("\n".join([*texts, f"{start.batches} {start.complete} {start.next_index} {start.chunk}"]).encode())


def _check_same(what: str, values: Sequence[object], fix: str) -> None:
    for rank, each in enumerate(values):
        if each != values[0]:
            raise RanksDisagree(
                what,
                expected=f"the same on every rank; rank 0 has {values[0] or 'none'}",
                found=f"rank {rank}: {each or 'none'}",
                fix=fix,
            )

"""A suite of metrics by name, and `Tally`: all of their accumulators as one value."""

from collections.abc import Mapping
from typing import Any, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.metrics.metric import Metric, metric_text, public_text
from trainfold.core.tensor_memory import check_plain

Suite = Mapping[str, Metric]
_METHODS = ("zero", "observe", "merge", "result")
_KINDS = ("nan", "inf", "-inf")


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Tally:
    """The accumulators of a suite: integers, so a tally can be saved, and merged with others in any order.

    Attributes:
        accumulators: one for each metric; pytrees of int64 tensors.
        batches: how many batches were observed.
        metrics: the metrics as text, by name; a different metric cannot continue with these accumulators.
        complete: whether nothing remained to be seen when its evaluation ended.
        next_index: the position of the `DistributedEvalCursor` then: the tally has every sample before it, each once. -1 without
            a cursor, or if the samples are not known: an evaluation that started late, or was cut inside a step, is never complete.
        chunk: the number of samples in the chunks that the forward saw; 0 if it saw the batches as they were.
    """

    accumulators: Mapping[str, Any]
    batches: int
    metrics: Mapping[str, str]
    complete: bool
    next_index: int
    chunk: int = 0


def check_suite(suite: object) -> dict[str, Metric]:
    """A suite as a dict sorted by name, so that the order is the same on every rank.

    Raises:
        InvalidArgument: unless it is a mapping from names to metrics that is not empty.
    """
    if not isinstance(suite, Mapping) or not suite or not all(isinstance(name, str) for name in suite):
        raise InvalidArgument(
            "suite",
            expected="a mapping from names to metrics",
            found=shown(suite),
            fix="name what to measure, as in {'loss': M.Ratio()}",
        )
    for name, metric in suite.items():
        missing = [method for method in _METHODS if not callable(getattr(metric, method, None))]
        if missing or isinstance(metric, type):
            raise InvalidArgument(
                f"suite[{name!r}]",
                expected=f"a metric, with the methods {', '.join(_METHODS)}",
                found=f"the class {metric.__name__}" if isinstance(metric, type) else shown(metric),
                fix="make one, as in M.Ratio()" if isinstance(metric, type) else "see trainfold.metrics.Metric",
            )
    return {name: suite[name] for name in sorted(suite)}


def no_tally(suite: Suite) -> Tally:
    """The empty tally.

    Examples:
        >>> from trainfold import metrics as M
        >>> results_of({"loss": M.Ratio()}, no_tally({"loss": M.Ratio()}))
        {}
    """
    return Tally(
        {name: metric.zero() for name, metric in suite.items()}, 0, texts_of(suite), complete=False, next_index=-1
    )


def texts_of(suite: Suite) -> dict[str, str]:
    """Each metric as text."""
    return {name: metric_text(metric) for name, metric in suite.items()}


def check_tally(where: str, suite: Suite, tally: object) -> None:
    """Refuse a tally of other metrics, or of metrics with other fields.

    Raises:
        InvalidArgument: naming the metrics that differ.
    """
    wanted = texts_of(suite)
    texts = tally.metrics if isinstance(tally, Tally) and isinstance(tally.metrics, Mapping) else {}
    found = {name: public_text(text) if isinstance(text, str) else text for name, text in texts.items()}
    is_whole = isinstance(tally, Tally) and isinstance(tally.accumulators, Mapping)
    if found == wanted and is_whole and tally.accumulators.keys() == wanted.keys():  # type: ignore[attr-defined]
        return
    differs = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    raise InvalidArgument(
        where,
        expected="; ".join(f"{name}: {wanted.get(name, 'absent')}" for name in differs) or "a tally of this suite",
        found="; ".join(f"{name}: {found.get(name, 'absent')}" for name in differs) if found else shown(tally),
        fix="pass the suite of the evaluation that was interrupted, and its .tally",
    )


def arguments_of(outputs: Any) -> tuple[Any, ...]:
    """The arguments of a metric's ``observe`` after the accumulator: those of a tuple or list, or the one value."""
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def observe(suite: Suite, tally: Tally, outputs: object) -> Tally:
    """The tally with one more batch.

    Args:
        suite: the metrics.
        tally: their accumulators; it is not changed.
        outputs: for each metric that the batch has values for, the arguments of its ``observe`` as a tuple, or the one argument.

    Raises:
        InvalidArgument: for outputs that are not a mapping, names that are not in the suite, and tensors that are not plain
            memory, such as DTensors.

    Examples:
        >>> from trainfold import metrics as M
        >>> suite = {"loss": M.Ratio()}
        >>> results_of(suite, observe(suite, no_tally(suite), {"loss": (torch.tensor([1.0, 2.0]), 4)}))
        {'loss': 0.75}
    """
    if not isinstance(outputs, Mapping):
        raise InvalidArgument(
            "what forward returned",
            expected="a mapping from the suite's names to tensors, or tuples of them",
            found=shown(outputs),
            fix="return {'loss': (numerator, denominator)}",
        )
    unknown = sorted(str(name) for name in outputs if name not in suite)
    if unknown:
        raise InvalidArgument(
            "what forward returned",
            expected=f"names of the suite: {', '.join(suite)}",
            found=", ".join(unknown),
            fix="add a metric of that name, or do not return it",
        )
    accumulators = dict(tally.accumulators)
    for name in suite:
        if name in outputs:
            try:
                given = arguments_of(outputs[name])
                for leaf in tree.leaves(given):
                    if isinstance(leaf, torch.Tensor):
                        check_plain(f"what forward returned for {name!r}", leaf)
                accumulators[name] = suite[name].observe(accumulators[name], *given)
            except Exception as error:
                error.add_note(f"(metric {name!r}: {suite[name]!r})")
                raise
    return attrs.evolve(tally, accumulators=accumulators, batches=tally.batches + 1)


def merge_tallies(suite: Suite, one: Tally, other: Tally) -> Tally:
    """The tally of the batches of both, on the CPU.

    Law: commutative, associative, `no_tally` is neutral, to the bit.
    """
    merged = {name: metric.merge(one.accumulators[name], other.accumulators[name]) for name, metric in suite.items()}
    return attrs.evolve(
        one,
        accumulators=merged,
        batches=one.batches + other.batches,
        complete=one.complete or other.complete,
        next_index=max(one.next_index, other.next_index),
    )


def results_of(suite: Suite, tally: Tally) -> dict[str, Any]:
    """The result of each metric; one without a result, such as a ratio whose denominator is 0, is absent."""
    if tally.batches == 0:
        return {}
    found = {name: metric.result(tally.accumulators[name]) for name, metric in suite.items()}
    return {name: result for name, result in found.items() if result is not None}


def nonfinite_of(tally: Tally) -> dict[str, dict[str, int]]:
    """How many terms of each metric were NaN or infinite, if any were: the counts in leaves named ``special``.

    Examples:
        >>> from trainfold import metrics as M
        >>> suite = {"loss": M.Ratio()}
        >>> nonfinite_of(observe(suite, no_tally(suite), {"loss": (torch.tensor([1.0, float("nan")]), 2)}))
        {'loss': {'nan': 1}}
    """
    found = {}
    for name, accumulator in tally.accumulators.items():
        counts = torch.zeros(len(_KINDS), dtype=torch.int64, device="cpu")
        for path, leaf in tree.named_leaves(accumulator, "accumulator"):
            if path.endswith((".special", "['special']")):
                counts += leaf.cpu().reshape(-1, len(_KINDS)).sum(0)
        kinds = {kind: count for kind, count in zip(_KINDS, counts.tolist(), strict=True) if count}
        if kinds:
            found[name] = kinds
    return found

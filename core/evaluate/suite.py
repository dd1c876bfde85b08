"""A suite of metrics by name, and `Tally`: what they have seen so far, as one value (Q01, Q02)."""

from collections.abc import Mapping
from typing import Any, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown
from trainfold.core.metrics.metric import Metric, public_text, text_of
from trainfold.core.tensor_memory import check_plain

Suite = Mapping[str, Metric]
_METHODS = ("zero", "observe", "merge", "result")
_KINDS = ("nan", "inf", "-inf")


@final
@tree.register_node(namespace=tree.NAMESPACE)
@attrs.frozen(eq=False)
class Tally:
    """What a suite of metrics has seen: integers, so that it can be saved, and merged with others in any order.

    Attributes:
        accumulators: one for each metric; pytrees of int64 tensors.
        batches: how many batches were observed.
        metrics: what the metrics are, as text, by name: another one cannot go on with these accumulators.
        complete: whether nothing remained to be seen when the evaluation ended that this is of.
        next_index: the sample at which its `DistributedEvalCursor` stood then: it is of all samples before that, each once. -1
            where there was none, or nobody knows: what begins late, or was cut in the middle of a step, is never completed.
        chunk: in chunks of how many samples the forward saw them; 0: in the batches that were given.
    """

    accumulators: Mapping[str, Any]
    batches: int
    metrics: Mapping[str, str]
    complete: bool
    next_index: int
    chunk: int = 0


def check_suite(suite: object) -> dict[str, Metric]:
    """A suite as a dict, in the order of its names, which is the same on every rank.

    Raises:
        InvalidArgument: if it is no mapping from names to metrics, or an empty one.
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
    """The tally of nothing.

    Examples:
        >>> from trainfold import metrics as M
        >>> results_of({"loss": M.Ratio()}, no_tally({"loss": M.Ratio()}))
        {}
    """
    return Tally(
        {name: metric.zero() for name, metric in suite.items()}, 0, texts_of(suite), complete=False, next_index=-1
    )


def texts_of(suite: Suite) -> dict[str, str]:
    """What each metric is, as text."""
    return {name: text_of(metric) for name, metric in suite.items()}


def check_tally(where: str, suite: Suite, tally: object) -> None:
    """Refuse a tally that is not of these metrics, fields and all.

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
        fix="give the same suite as to the evaluation that was interrupted, and its .tally",
    )


def arguments_of(outputs: Any) -> tuple[Any, ...]:
    """What a metric's ``observe`` gets after the accumulator: a tuple or list of arguments, or one."""
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def observe(suite: Suite, tally: Tally, outputs: object) -> Tally:
    """The tally with one more batch.

    Args:
        suite: the metrics.
        tally: what they have seen; it is not changed.
        outputs: for each metric that this batch says something of, the arguments of its ``observe`` as a tuple, or the one
            argument.

    Raises:
        InvalidArgument: for outputs that are no mapping, names that the suite has not, and tensors that are not plain memory, such
            as DTensors.

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
    """Return what each metric says; those that have nothing to say, such as a ratio without a denominator, are absent."""
    if tally.batches == 0:
        return {}
    found = {name: metric.result(tally.accumulators[name]) for name, metric in suite.items()}
    return {name: result for name, result in found.items() if result is not None}


def nonfinite_of(tally: Tally) -> dict[str, dict[str, int]]:
    """How many terms of each metric were NaN or infinite, where any were: what accumulators count as ``special``.

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

"""The rules of a metric: each is a function that checks a case and raises if the metric breaks the rule."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.evaluate.suite import arguments_of
from trainfold.core.metrics.metric import Metric
from trainfold.properties.batches import OutputsOf, cuts_of, fresh, row_count, taken
from trainfold.properties.differences import ContractBroken
from trainfold.properties.metrics.accumulators import difference_of, leafwise_sum, result_text

__all__ = ["METRIC_RULES", "Case", "Rule", "make_case"]

_MANY: Final = 6  # accumulators to combine in all triples: 216 of them
_POISONED: Final = 3  # rows that are set to NaN one at a time, before all of them are


@final
@attrs.frozen(eq=False)
class Case:
    """What the rules check.

    Attributes:
        make_metric: makes equal metrics.
        metric: one of them.
        samples: batches.
        outputs_of: maps a batch, or a part of one, to the arguments of ``observe``.
        nothing: batches in which nothing counts.
        seen: an accumulator for each sample.
    """

    make_metric: Callable[[], Metric]
    metric: Metric
    samples: tuple[Any, ...]
    outputs_of: OutputsOf
    nothing: tuple[Any, ...]
    seen: tuple[Any, ...] = ()

    def arguments(self, sample: Any) -> tuple[Any, ...]:
        """The arguments of ``observe`` for a sample, copied, so that a metric that changes them breaks one rule and not all."""
        outputs: tuple[Any, ...] = fresh(arguments_of(self.outputs_of(fresh(sample))))
        return outputs

    def observed(self, *samples: Any) -> Any:
        """The accumulator of some samples, observed one after the other."""
        acc = self.metric.zero()
        for sample in samples:
            acc = self.metric.observe(acc, *self.arguments(sample))
        return acc

    def merged(self, accs: Sequence[Any]) -> Any:
        """The accumulators merged in order."""
        found = self.metric.zero()
        for acc in accs:
            found = self.metric.merge(found, acc)
        return found


Rule = Callable[[Case], None]


def make_case(
    make_metric: Callable[[], Metric], samples: tuple[Any, ...], *, outputs_of: OutputsOf, nothing: tuple[Any, ...]
) -> Case:
    """A metric, and its accumulator for each sample."""
    metric = make_metric()
    _equal("isinstance(metric, Metric)", expected=True, found=isinstance(metric, Metric))
    case = Case(make_metric, metric, samples, outputs_of, nothing)
    return attrs.evolve(case, seen=tuple(case.observed(sample) for sample in samples))


def accumulators_are_trees_of_int64_tensors(case: Case) -> None:
    """Only these can be added up over ranks without rounding, saved and compared."""
    for name, acc in (
        ("zero()", case.metric.zero()),
        *((f"observe(zero(), sample {i})", a) for i, a in enumerate(case.seen)),
    ):
        for path, leaf in tree.named_leaves(acc, name):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.int64:
                kind = str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise ContractBroken(f"{path} is {kind}, not an int64 tensor")


def zero_is_absent(case: Case) -> None:
    """The result of an empty accumulator is None, not a number that was never measured."""
    _equal("result(zero())", expected=None, found=case.metric.result(case.metric.zero()))


def an_empty_batch_is_absent(case: Case) -> None:
    """A batch without rows has no result either."""
    for i, sample in enumerate(case.samples):
        if row_count(sample) is not None:
            found = case.metric.result(case.observed(taken(sample, slice(0))))
            _equal(f"the result of sample {i} without its rows", expected=None, found=found)


def a_batch_in_which_nothing_counts_is_absent(case: Case) -> None:
    """Neither has one with a mask of zeros: ``sum / max(n, 1)`` invents 0.0, the best possible loss."""
    for i, sample in enumerate(case.nothing):
        _equal(f"the result of nothing[{i}]", expected=None, found=case.metric.result(case.observed(sample)))


def zero_is_neutral(case: Case) -> None:
    """``merge(zero(), a) = a = merge(a, zero())``."""
    for i, acc in enumerate((case.metric.zero(), *case.seen)):
        name = f"the accumulator of sample {i - 1}" if i else "zero()"
        _same(case, case.metric.merge(case.metric.zero(), acc), acc, f"merge(zero(), a) and a, {name}")
        _same(case, case.metric.merge(acc, case.metric.zero()), acc, f"merge(a, zero()) and a, {name}")


def merging_is_commutative(case: Case) -> None:
    """``merge(a, b) = merge(b, a)``."""
    for (i, one), (j, other) in itertools.combinations(_some(case), 2):
        what = f"merge(a, b) and merge(b, a), samples {i} and {j}"
        _same(case, case.metric.merge(one, other), case.metric.merge(other, one), what)


def merging_is_associative(case: Case) -> None:
    """``merge(merge(a, b), c) = merge(a, merge(b, c))``."""
    merge = case.metric.merge
    for (i, a), (j, b), (k, c) in itertools.product(_some(case), repeat=3):
        what = f"merge(merge(a, b), c) and merge(a, merge(b, c)), samples {i}, {j}, {k}"
        _same(case, merge(merge(a, b), c), merge(a, merge(b, c)), what)


def observing_is_merging(case: Case) -> None:
    """Observing batches one after the other, in any order, equals merging their accumulators."""
    whole = case.merged(case.seen)
    _same(case, case.observed(*case.samples), whole, "all samples observed in order and merged")
    _same(case, case.observed(*reversed(case.samples)), whole, "all samples observed in the opposite order and merged")


def a_split_batch_is_its_parts(case: Case) -> None:
    """Wherever a batch is cut, the parts have the bits of the whole; a mean of batch means breaks this."""
    for i, sample in enumerate(case.samples):
        for cut, first, rest in cuts_of(sample):
            one, other = case.observed(first), case.observed(rest)
            what = f"sample {i} as a whole and cut at {cut},"
            _same(case, case.seen[i], case.metric.merge(one, other), f"{what} merged")
            _same(case, case.seen[i], case.observed(first, rest), f"{what} observed")


def nothing_given_is_changed(case: Case) -> None:
    """Neither accumulators nor outputs: the old values stay valid."""
    metric = case.metric
    for i, sample in enumerate(case.samples):
        given, acc = case.arguments(sample), case.observed(case.samples[i - 1])
        outputs, kept = fresh(given), fresh(acc)
        metric.observe(acc, *given)
        _untouched("observe", "accumulator", kept, acc)
        _untouched("observe", "outputs", outputs, given)
        other = case.observed(sample)
        others = fresh(other)
        metric.merge(acc, other)
        metric.result(acc)
        _untouched("merge or result", "accumulator", kept, acc)
        _untouched("merge", "other accumulator", others, other)


def the_accumulator_is_all_there_is(case: Case) -> None:
    """An equal metric with copies of the leaves has the same result, and returns it twice."""
    for acc in (*case.seen, case.merged(case.seen)):
        flat, spec = tree.flatten(acc)
        again = tree.unflatten(spec, [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
        first = result_text(case.metric.result(acc))
        _equal("the result, asked for a second time", expected=first, found=result_text(case.metric.result(acc)))
        _equal("the result of an equal metric", expected=first, found=result_text(case.make_metric().result(again)))


def nan_is_not_swallowed(case: Case) -> None:
    """A NaN that changes the accumulator shows in the result, or is counted in a leaf named ``special``."""
    for i, sample in enumerate(case.samples):
        flat, spec = tree.flatten(case.arguments(sample))
        for j, leaf in enumerate(flat):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.numel() == 0:
                continue
            for rows in [*range(min(_POISONED, len(leaf)) if leaf.dim() else 0), ...]:
                poisoned = leaf.clone()
                poisoned[rows] = math.nan
                acc = case.metric.observe(
                    case.metric.zero(), *tree.unflatten(spec, [*flat[:j], poisoned, *flat[j + 1 :]])
                )
                if difference_of(acc, case.seen[i]) is not None and _special(acc) == _special(case.seen[i]):
                    where = "all of it is" if rows is ... else f"row {rows} is"
                    _has_nan(
                        f"sample {i}, where {where} NaN in output {tree.paths(tree.unflatten(spec, flat))[j]},",
                        case.metric.result(acc),
                    )


def no_device_is_waited_for(case: Case) -> None:
    """Outputs may be on a device, and no call reads a value from it: on ``meta`` there is none."""
    metric = case.make_metric()
    for i, sample in enumerate(case.samples):
        there = tree.map_tensors(lambda tensor: tensor.to("meta"), case.arguments(sample))
        try:
            metric.observe(metric.observe(metric.zero(), *there), *there)
        except Exception as error:
            raise ContractBroken(
                f"sample {i} on the device meta, which has shapes and no values: {type(error).__name__}: {error}"[:600]
            ) from error


def results_are_plain(case: Case) -> None:
    """None, numbers, and lists and dicts of them, which a log can hold."""
    for i, acc in enumerate(case.seen):
        for path, leaf in tree.named_leaves(case.metric.result(acc), f"result of sample {i}"):
            if leaf is not None and type(leaf) not in {int, float}:
                raise ContractBroken(f"{path} is {type(leaf).__name__}, not a Python number")


def additive_is_the_truth(case: Case) -> None:
    """If a metric claims that its accumulators can be added up leaf by leaf, they can."""
    if not getattr(case.metric, "additive", False):
        return
    for size in range(1, len(case.seen) + 1):
        accs = (case.metric.zero(), *case.seen[:size])
        added = case.metric.merge(case.metric.zero(), leafwise_sum(accs))
        _same(case, added, case.merged(accs), f"samples 0 to {size - 1} added up leaf by leaf and merged")


METRIC_RULES: Final[tuple[Rule, ...]] = (
    accumulators_are_trees_of_int64_tensors,
    zero_is_absent,
    an_empty_batch_is_absent,
    a_batch_in_which_nothing_counts_is_absent,
    zero_is_neutral,
    merging_is_commutative,
    merging_is_associative,
    observing_is_merging,
    a_split_batch_is_its_parts,
    nothing_given_is_changed,
    the_accumulator_is_all_there_is,
    nan_is_not_swallowed,
    no_device_is_waited_for,
    results_are_plain,
    additive_is_the_truth,
)


def _some(case: Case) -> list[tuple[int, Any]]:
    return list(enumerate(case.seen))[:_MANY]


def _special(acc: Any) -> list[int]:
    """How many terms were NaN, by the leaves named ``special``."""
    return [
        int(leaf[..., 0].sum())
        for path, leaf in tree.named_leaves(acc, "accumulator")
        if path.endswith((".special", "['special']"))
    ]


def _has_nan(what: str, result: Any) -> None:
    if not any(isinstance(leaf, float) and math.isnan(leaf) for leaf in tree.leaves(result)):
        raise ContractBroken(f"{what} has the result {result_text(result)}, and no leaf named special counts it"[:600])


def _same(case: Case, one: Any, other: Any, what: str) -> None:
    results = result_text(case.metric.result(one)), result_text(case.metric.result(other))
    if results[0] != results[1]:
        raise ContractBroken(f"{what} have the results {results[0]} and {results[1]}"[:600])
    if found := difference_of(one, other):
        raise ContractBroken(f"{what} differ in a bit: {found}"[:600])


def _untouched(verb: str, what: str, before: Any, after: Any) -> None:
    if found := difference_of(before, after):
        raise ContractBroken(f"{verb} changed its {what}: {found}")


def _equal(what: str, *, expected: object, found: object) -> None:
    if expected != found:
        raise ContractBroken(f"{what}: expected {expected!r}, found {found!r}"[:600])

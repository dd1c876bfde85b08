"""The contract of a metric: `check_metric` says whether somebody's `Metric` tells the truth, and names every rule that it breaks."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import attrs
import torch

from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.metrics.metric import Metric
from trainfold.properties.accumulators import difference_of, leafwise_sum, shown
from trainfold.properties.differences import ContractBroken

__all__ = ["check_metric"]

_MANY: Final = 6  # accumulators that are tried in all triples: 216 of them

Outputs: TypeAlias = tuple[Any, ...]


@final
@attrs.frozen(eq=False)
class _Case:
    """What the rules look at.

    Attributes:
        make_metric: makes equal metrics.
        metric: one of them.
        batches: the samples, each a tuple of what ``observe`` gets after the accumulator.
        seen: an accumulator for each.
    """

    make_metric: Callable[[], Metric]
    metric: Metric
    batches: tuple[Outputs, ...]
    seen: tuple[Any, ...]

    def observed(self, *batches: Outputs) -> Any:
        """The accumulator of some batches, observed one after the other."""
        acc = self.metric.zero()
        for batch in batches:
            acc = self.metric.observe(acc, *copy.deepcopy(batch))  # one that changes them breaks one rule, not all
        return acc

    def merged(self, accs: Sequence[Any]) -> Any:
        """All of them, merged in order."""
        return _fold(self.metric, accs)


Rule = Callable[[_Case], None]


def check_metric(make_metric: Callable[[], Metric], samples: Sequence[Any]) -> None:
    """Check that a metric keeps the contract of `Metric`, to the bit.

    Args:
        make_metric: makes the metric; called more than once, so that what a metric keeps to itself is found out.
        samples: batches, three or more with different contents; each is what ``observe`` gets after the accumulator, a tuple
            where that is more than one thing. Dimension 0 of tensors is that of samples: batches are cut along it.

    Raises:
        ContractBroken: naming every broken rule, and the leaf and the bits that differ.
        InvalidArgument: for fewer than two samples.

    Examples:
        >>> from trainfold.core.metrics.total import Mean
        >>> check_metric(Mean, [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.5, 1e30]), torch.tensor([-1e30])])
    """
    if len(samples) < 2:
        raise InvalidArgument("samples", expected="two or more", found=len(samples), mend="give batches that differ")
    batches = tuple(sample if isinstance(sample, tuple) else (sample,) for sample in samples)
    broken = []
    try:
        metric = make_metric()
        _equal("isinstance(metric, Metric)", expected=True, found=isinstance(metric, Metric))
        seen = tuple(metric.observe(metric.zero(), *copy.deepcopy(batch)) for batch in batches)
        case = _Case(make_metric, metric, batches, seen)
    except Exception as error:
        raise ContractBroken(f"it measures: {type(error).__name__}: {error}") from error
    for rule in METRIC_RULES:
        try:
            rule(case)
        except Exception as error:  # noqa: BLE001  # whatever a foreign metric raises breaks the rule
            about = str(error) if isinstance(error, ContractBroken) else f"{type(error).__name__}: {error}"
            broken.append(f"{rule.__name__.replace('_', ' ')}: {about}")
    if broken:
        raise ContractBroken(f"{len(broken)} of {len(METRIC_RULES)} rules are broken:\n  " + "\n  ".join(broken))


def accumulators_are_trees_of_int64_tensors(case: _Case) -> None:
    """Nothing else can be added up over ranks without rounding, saved and compared."""
    for name, acc in (
        ("zero()", case.metric.zero()),
        *((f"observe(zero(), sample {i})", a) for i, a in enumerate(case.seen)),
    ):
        for path, leaf in tree.named_leaves(acc, name):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.int64:
                kind = str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise ContractBroken(f"{path} is {kind}, not an int64 tensor")


def zero_is_absent(case: _Case) -> None:
    """Nothing seen is None, and not a number that nobody measured."""
    _equal("result(zero())", expected=None, found=case.metric.result(case.metric.zero()))


def zero_is_neutral(case: _Case) -> None:
    """``merge(zero(), a) = a = merge(a, zero())``."""
    for i, acc in enumerate((case.metric.zero(), *case.seen)):
        name = f"the accumulator of sample {i - 1}" if i else "zero()"
        _same(case, case.metric.merge(case.metric.zero(), acc), acc, f"merge(zero(), a) and a, {name}")
        _same(case, case.metric.merge(acc, case.metric.zero()), acc, f"merge(a, zero()) and a, {name}")


def merging_is_commutative(case: _Case) -> None:
    """``merge(a, b) = merge(b, a)``."""
    for (i, one), (j, other) in itertools.combinations(_some(case), 2):
        what = f"merge(a, b) and merge(b, a), samples {i} and {j}"
        _same(case, case.metric.merge(one, other), case.metric.merge(other, one), what)


def merging_is_associative(case: _Case) -> None:
    """``merge(merge(a, b), c) = merge(a, merge(b, c))``."""
    merge = case.metric.merge
    for (i, a), (j, b), (k, c) in itertools.product(_some(case), repeat=3):
        what = f"merge(merge(a, b), c) and merge(a, merge(b, c)), samples {i}, {j}, {k}"
        _same(case, merge(merge(a, b), c), merge(a, merge(b, c)), what)


def observing_is_merging(case: _Case) -> None:
    """Batches observed one after the other, in any order, are their accumulators merged."""
    whole = case.merged(case.seen)
    _same(case, case.observed(*case.batches), whole, "all samples observed in order and merged")
    _same(case, case.observed(*reversed(case.batches)), whole, "all samples observed in the opposite order and merged")


def a_split_batch_is_its_parts(case: _Case) -> None:
    """Wherever a batch is cut, the parts have the bits of the whole: this is what a mean of batch means breaks."""
    for i, batch in enumerate(case.batches):
        for cut, first, rest in _cuts(batch):
            one, other = case.observed(first), case.observed(rest)
            what = f"sample {i} as a whole and cut at {cut},"
            _same(case, case.seen[i], case.metric.merge(one, other), f"{what} merged")
            _same(case, case.seen[i], case.observed(first, rest), f"{what} observed")


def nothing_given_is_changed(case: _Case) -> None:
    """Neither accumulators nor outputs: the old ones stay true."""
    metric = case.metric
    for i, batch in enumerate(case.batches):
        given, acc = copy.deepcopy(batch), case.observed(case.batches[i - 1])
        kept = _copied(acc)
        metric.observe(acc, *given)
        _untouched("observe", "accumulator", kept, acc)
        _untouched("observe", "outputs", batch, given)
        other = case.observed(batch)
        others = _copied(other)
        metric.merge(acc, other)
        metric.result(acc)
        _untouched("merge or result", "accumulator", kept, acc)
        _untouched("merge", "other accumulator", others, other)


def the_accumulator_is_all_there_is(case: _Case) -> None:
    """Another metric of the same making, given copies of the leaves, has the same result, and has it twice."""
    for acc in (*case.seen, case.merged(case.seen)):
        flat, spec = tree.flatten(acc)
        again = tree.unflatten(spec, [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
        first = shown(case.metric.result(acc))
        _equal("the result, asked for a second time", expected=first, found=shown(case.metric.result(acc)))
        _equal("the result of a metric made anew", expected=first, found=shown(case.make_metric().result(again)))


def results_are_plain(case: _Case) -> None:
    """None, numbers, and lists and dicts of them: what a log can hold."""
    for i, acc in enumerate(case.seen):
        for path, leaf in tree.named_leaves(case.metric.result(acc), f"result of sample {i}"):
            if leaf is not None and type(leaf) not in {int, float}:
                raise ContractBroken(f"{path} is {type(leaf).__name__}, not a number of Python")


def additive_is_the_truth(case: _Case) -> None:
    """If a metric says that its accumulators can be added up leaf by leaf, then they can."""
    if not getattr(case.metric, "additive", False):
        return
    for size in range(1, len(case.seen) + 1):
        accs = (case.metric.zero(), *case.seen[:size])
        added = case.metric.merge(case.metric.zero(), leafwise_sum(accs))
        _same(case, added, case.merged(accs), f"samples 0 to {size - 1} added up leaf by leaf and merged")


METRIC_RULES: Final[tuple[Rule, ...]] = (
    accumulators_are_trees_of_int64_tensors,
    zero_is_absent,
    zero_is_neutral,
    merging_is_commutative,
    merging_is_associative,
    observing_is_merging,
    a_split_batch_is_its_parts,
    nothing_given_is_changed,
    the_accumulator_is_all_there_is,
    results_are_plain,
    additive_is_the_truth,
)


def _some(case: _Case) -> list[tuple[int, Any]]:
    return list(enumerate(case.seen))[:_MANY]


def _fold(metric: Metric, accs: Sequence[Any]) -> Any:
    found = metric.zero()
    for acc in accs:
        found = metric.merge(found, acc)
    return found


def _cuts(batch: Outputs) -> Iterator[tuple[int, Outputs, Outputs]]:
    """A batch cut in two along dimension 0, where all of it has one of the same size; a part may be empty."""
    sizes = {output.shape[0] if isinstance(output, torch.Tensor) and output.dim() else None for output in batch}
    size = sizes.pop()
    if sizes or size is None:
        return
    for cut in sorted({0, 1, size // 2, size - 1} & set(range(size + 1))):
        yield cut, tuple(output[:cut] for output in batch), tuple(output[cut:] for output in batch)


def _copied(acc: Any) -> Any:
    return tree.map_tensors(torch.clone, acc)


def _same(case: _Case, one: Any, other: Any, what: str) -> None:
    results = shown(case.metric.result(one)), shown(case.metric.result(other))
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

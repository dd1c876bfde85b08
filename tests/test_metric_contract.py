"""Teeth of `check_metric` and `batch_invariant`: metrics that lie are found out, by the rule that they break."""

import attrs
import pytest
import torch

from trainfold import metrics as M
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact import exact_add, exact_merge, exact_value, exact_zero
from trainfold.properties.contracts import ContractBroken, check_metric
from trainfold.properties.laws import LawBroken, batch_invariant

SAMPLES = [
    torch.tensor([0.1, 0.2, 0.3, 3e7]),
    torch.tensor([0.7]),
    torch.tensor([1.0, -2.0, 5.0, 0.25, -3e7, 11.0]),
    torch.tensor([]),
]


def micros(values):
    """Millionths: an honest way to have integers."""
    return (values.double() * 1e6).round().long()


class Count:
    """An honest metric, from which the others inherit what they do not break."""

    additive = True

    def zero(self):
        return {"sum": torch.tensor(0), "count": torch.tensor(0)}

    def observe(self, acc, values):
        return {"sum": acc["sum"] + micros(values).sum(), "count": acc["count"] + values.numel()}

    def merge(self, one, other):
        return tree.map(torch.add, one, other)

    def result(self, acc):
        return int(acc["sum"]) / 1e6 / int(acc["count"]) if int(acc["count"]) else None


class MeanOfBatchMeans(Count):
    """What Lightning-style logging does with a ragged last batch."""

    def observe(self, acc, values):
        mean = micros(values.mean()) if values.numel() else torch.tensor(0)
        return {"sum": acc["sum"] + mean, "count": acc["count"] + bool(values.numel())}


class Float32(Count):
    """A float32 accumulator, hidden in the bits of an int64."""

    additive = False

    def zero(self):
        return {"sum": torch.tensor(0.0).view(torch.int32).long(), "count": torch.tensor(0)}

    @staticmethod
    def float_of(acc):
        return acc["sum"].int().view(torch.float32)

    def observe(self, acc, values):
        total = self.float_of(acc) + values.float().sum()
        return {"sum": total.view(torch.int32).long(), "count": acc["count"] + values.numel()}

    def merge(self, one, other):
        total = self.float_of(one) + self.float_of(other)
        return {"sum": total.view(torch.int32).long(), "count": one["count"] + other["count"]}

    def result(self, acc):
        return self.float_of(acc).item() / int(acc["count"]) if int(acc["count"]) else None


class Last(Count):
    """The last batch that was seen, and of two accumulators the second one."""

    additive = False

    def observe(self, acc, values):
        return super().observe(self.zero(), values) if values.numel() else acc

    def merge(self, one, other):
        return other if int(other["count"]) else one


class Greatest(Count):
    """Right, but for what it says of adding."""

    def observe(self, acc, values):
        return self.merge(acc, {"sum": micros(values).amax(), "count": torch.tensor(1)}) if values.numel() else acc

    def zero(self):
        return {"sum": torch.tensor(-(2**60)), "count": torch.tensor(0)}

    def merge(self, one, other):
        return {"sum": torch.maximum(one["sum"], other["sum"]), "count": one["count"] | other["count"]}

    def result(self, acc):
        return int(acc["sum"]) / 1e6 if int(acc["count"]) else None


class FloatLeaf(Count):
    def zero(self):
        return {"sum": torch.tensor(0.0, dtype=torch.float64), "count": torch.tensor(0)}

    def observe(self, acc, values):
        return {"sum": acc["sum"] + values.double().sum(), "count": acc["count"] + values.numel()}


class Mutating(Count):
    def observe(self, acc, values):
        acc["sum"] += micros(values).sum()
        acc["count"] += values.numel()
        return acc


class MutatingMerge(Count):
    def merge(self, one, other):
        one["sum"] += other["sum"]
        one["count"] += other["count"]
        return one


class MutatingOutputs(Count):
    def observe(self, acc, values):
        return super().observe(acc, values.clamp_(min=0))


class MakesUpZero(Count):
    """S50: a best metric that nobody measured."""

    def result(self, acc):
        return int(acc["sum"]) / 1e6 / max(int(acc["count"]), 1)


class StartsAtOne(Count):
    def zero(self):
        return {"sum": torch.tensor(0), "count": torch.tensor(1)}

    def result(self, acc):
        return int(acc["sum"]) / 1e6 if int(acc["count"]) > 1 else None


class Remembers(Count):
    """It keeps the count to itself, as torchmetrics do; a rank or a resumed run would not have it."""

    def __init__(self):
        self.count = 0

    def observe(self, acc, values):
        self.count += values.numel()
        return {**super().observe(acc, values), "count": torch.tensor(0)}

    def result(self, acc):
        return int(acc["sum"]) / 1e6 / self.count if self.count and int(acc["sum"]) else None


class ShowsTensors(Count):
    def result(self, acc):
        return acc["sum"] if int(acc["count"]) else None


class SideBySide(Count):
    """Means of pairs: commutative and not associative."""

    additive = False

    def merge(self, one, other):
        if not int(one["count"]) or not int(other["count"]):
            return other if int(other["count"]) else one
        return {"sum": (one["sum"] + other["sum"]) // 2, "count": torch.tensor(1)}

    def result(self, acc):
        return int(acc["sum"]) / 1e6 if int(acc["count"]) else None


@attrs.define
class Stranger:
    """A class that no tree knows."""

    values: torch.Tensor


class Opaque(Count):
    def zero(self):
        return Stranger(torch.tensor(0))

    def observe(self, acc, values):
        return Stranger(acc.values + micros(values).sum())

    def merge(self, one, other):
        return Stranger(one.values + other.values)

    def result(self, acc):
        return int(acc.values) or None


LIARS = {
    MeanOfBatchMeans: "a split batch is its parts: sample 0 as a whole and cut at 1, merged have the results",
    Float32: "merging is associative: ",
    Last: "merging is commutative: ",
    Greatest: "additive is the truth: ",
    FloatLeaf: r"accumulators are trees of int64 tensors: zero\(\)\['sum'\] is torch.float64",
    Mutating: "nothing given is changed: observe changed its accumulator",
    MutatingMerge: "nothing given is changed: merge or result changed its accumulator",
    MutatingOutputs: "nothing given is changed: observe changed its outputs",
    MakesUpZero: r"zero is absent: result\(zero\(\)\): expected None, found 0.0",
    StartsAtOne: "zero is neutral: ",
    Remembers: "the accumulator is all there is: the result of a metric made anew: expected",
    ShowsTensors: "results are plain: result of sample 0 is Tensor, not a number of Python",
    SideBySide: "merging is associative: ",
    Opaque: r"accumulators are trees of int64 tensors: zero\(\) is Stranger, not an int64 tensor",
}


def copies():
    return [sample.clone() for sample in SAMPLES]


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_a_metric_that_lies_is_found_out_by_the_rule_that_it_breaks(liar):
    with pytest.raises(ContractBroken, match=LIARS[liar]):
        check_metric(liar, copies())


@pytest.mark.parametrize("honest", [Count, M.Mean, M.Variance, M.Min], ids=lambda honest: honest.__name__)
def test_an_honest_metric_passes(honest):
    check_metric(honest, copies())
    batch_invariant(honest(), torch.cat(SAMPLES))


@pytest.mark.parametrize("liar", [MeanOfBatchMeans, Float32, Last, FloatLeaf])
def test_what_changes_with_the_batches_breaks_the_law_of_batches(liar):
    """Q01: the message says how the samples were cut and dealt out."""
    values = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        LawBroken, match=r"batch invariance: \w+: .* against .*; batches of \[\[.*\]\] rows, a list for each rank"
    ):
        batch_invariant(liar(), values)


def test_an_order_that_only_ranks_show_is_found():
    """Right on one rank, in any order of batches; wrong where ranks are merged."""

    class LastRank(Count):
        def merge(self, one, other):
            return other if int(other["count"]) else one

    with pytest.raises(LawBroken, match="batch invariance"):
        batch_invariant(LastRank(), torch.cat(SAMPLES))
    with pytest.raises(ContractBroken, match="merging is commutative"):
        check_metric(LastRank, copies())


def test_a_difference_that_no_result_shows_yet_is_found():
    """Two sums that cancel in the result are not the same accumulator."""

    class Split(Count):
        def observe(self, acc, values):
            return super().observe(acc, values) | {
                "sum": acc["sum"] + micros(values).sum(),
                "batches": acc["batches"] + 1,
            }

        def zero(self):
            return {**super().zero(), "batches": torch.tensor(0)}

    with pytest.raises(LawBroken, match=r"batch invariance: accumulator: \['batches'\]"):
        batch_invariant(Split(), torch.cat(SAMPLES))
    with pytest.raises(ContractBroken, match=r"differ in a bit: \['batches'\]"):
        check_metric(Split, copies())


def test_a_metric_that_cannot_measure_says_so():
    class Broken(Count):
        def observe(self, acc, values):
            raise KeyError("nothing")

    class Half:
        def zero(self):
            return torch.tensor(0)

    for kind in (Broken, Half):
        with pytest.raises(ContractBroken, match="it measures: "):
            check_metric(kind, copies())


def test_there_has_to_be_something_to_compare():
    with pytest.raises(InvalidArgument, match="samples: expected two or more"):
        check_metric(M.Mean, SAMPLES[:1])
    for values in ((torch.zeros(2), torch.zeros(3)), torch.tensor(1.0), (torch.zeros(2), 2)):
        with pytest.raises(InvalidArgument, match="values: expected tensors with the same size"):
            batch_invariant(M.Ratio(), values)


def test_tuples_dicts_and_exact_sums_make_a_metric_of_ones_own():
    """What the how-to shows: weights beside the count."""

    class Weighted:
        additive = True

        def zero(self):
            return exact_zero(), {"seen": torch.zeros(1, dtype=torch.int64)}

        def observe(self, acc, values, weights):
            products = values.double() * weights.double()
            return exact_add(acc[0], products), {"seen": acc[1]["seen"] + values.numel()}

        def merge(self, one, other):
            return exact_merge(one[0], other[0]), {"seen": one[1]["seen"] + other[1]["seen"]}

        def result(self, acc):
            return float(exact_value(acc[0])) if int(acc[1]["seen"]) else None

    samples = [(torch.rand(n), torch.rand(n)) for n in (3, 1, 4)]
    check_metric(Weighted, samples)
    batch_invariant(Weighted(), (torch.rand(30), torch.rand(30)))


def test_batches_that_cannot_be_cut_are_observed_as_they_are():
    check_metric(M.Ratio, [(torch.tensor([1.0, 2.0]), 2), (0.5, torch.tensor([True, False])), (1, 3)])


def test_accumulators_of_another_structure_are_named():
    class Grows(Count):
        def observe(self, acc, values):
            return {**super().observe(acc, values), "last": torch.tensor(0)}

        def merge(self, one, other):
            return {name: one[name] + other[name] for name in ("sum", "count")}

    with pytest.raises(ContractBroken, match=r"zero is neutral: .* the trees are "):
        check_metric(Grows, copies())

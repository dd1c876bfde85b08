"""Teeth of `check_metric` and `batch_invariant`: metrics that lie are found out, by the rule that they break."""

import math

import attrs
import numpy as np
import pytest
import torch

from trainfold import metrics as M
from trainfold.core import tree
from trainfold.core.errors import InvalidArgument
from trainfold.core.exact.sum import exact_add, exact_merge, exact_value, exact_zero
from trainfold.properties.contracts import ContractBroken, check_metric
from trainfold.properties.laws import LawBroken, batch_invariant

SAMPLES = [
    torch.tensor([0.1, 0.2, 0.3, 3e7]),
    torch.tensor([0.7]),
    torch.tensor([1.0, -2.0, 5.0, 0.25, -3e7, 11.0]),
    torch.tensor([]),
]


_NAN = 1 << 50  # larger than any sum here


def micros(values):
    """Round to millionths, a correct way to get integers."""
    return torch.where(values.isnan(), _NAN, (values.double() * 1e6).round()).long()


class Count:
    """A correct metric; the broken ones below inherit everything else from it."""

    additive = True

    def zero(self):
        return {"sum": torch.tensor(0), "count": torch.tensor(0)}

    def observe(self, acc, values):
        return {"sum": acc["sum"] + micros(values).sum(), "count": acc["count"] + values.numel()}

    def merge(self, one, other):
        return tree.map(torch.add, one, other)

    def result(self, acc):
        if abs(int(acc["sum"])) >= _NAN // 2:
            return math.nan
        return int(acc["sum"]) / 1e6 / int(acc["count"]) if int(acc["count"]) else None


class Masked(Count):
    """Also correct: it counts the rows, and the rows that a mask selects."""

    def zero(self):
        return {"sum": torch.tensor(0), "count": torch.tensor(0), "rows": torch.tensor(0)}

    def observe(self, acc, values, mask):
        found = {"sum": (micros(values) * mask).sum(), "count": mask.sum(), "rows": torch.tensor(mask.numel())}
        return tree.map(torch.add, acc, found)


class MeanOfBatchMeans(Count):
    """Averages batch means, as Lightning-style logging does, which is wrong for a smaller last batch."""

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
    """Keeps the last batch; merging two accumulators keeps the second one."""

    additive = False

    def observe(self, acc, values):
        return super().observe(self.zero(), values) if values.numel() else acc

    def merge(self, one, other):
        return other if int(other["count"]) else one


class Greatest(Count):
    """Correct, except that it claims that its accumulators can be added."""

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
    """S50: it returns 0 for no rows, which would be the best value ever, although nothing was measured."""

    def result(self, acc):
        return int(acc["sum"]) / 1e6 / max(int(acc["count"]), 1)


class StartsAtOne(Count):
    def zero(self):
        return {"sum": torch.tensor(0), "count": torch.tensor(1)}

    def result(self, acc):
        return int(acc["sum"]) / 1e6 if int(acc["count"]) > 1 else None


class Remembers(Count):
    """Keeps the count in the object, as torchmetrics do, so other ranks and resumed runs do not have it."""

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
    """A class that is not registered as a tree node."""

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


class MakesUpZeroForPadding(Masked):
    """S50: it has seen rows, but none of them counts."""

    def result(self, acc):
        found = super().result(acc)
        return 0.0 if found is None and int(acc["rows"]) else found  # as sum / max(count, 1) gives


class MakesUpZeroForNoRows(Count):
    """It makes up a value for an empty batch, which is a batch too."""

    additive = False

    def zero(self):
        return {**super().zero(), "is_seen": torch.tensor(0)}

    def observe(self, acc, values):
        return {**super().observe(acc, values), "is_seen": torch.tensor(1)}

    def merge(self, one, other):
        return {**tree.map(torch.add, one, other), "is_seen": one["is_seen"] | other["is_seen"]}

    def result(self, acc):
        return int(acc["sum"]) / 1e6 / max(int(acc["count"]), 1) if int(acc["is_seen"]) else None


def without_nan(values):
    return torch.where(values.isnan(), 0, values)


class SwallowsNan(Count):
    def observe(self, acc, values):
        return super().observe(acc, without_nan(values))


class LeavesNanOut(Count):
    """Takes the mean of the values that are not NaN; if all are NaN, the result is absent, as if nothing had been measured."""

    def observe(self, acc, values):
        seen = super().observe(acc, without_nan(values))
        return {**seen, "count": acc["count"] + (~values.isnan()).sum()}


class Waits(Count):
    def observe(self, acc, values):
        return {"sum": acc["sum"] + int(micros(values).sum()), "count": acc["count"] + values.numel()}


class LooksAtOne(Count):
    """Waits for the device, but only from the second batch on."""

    def observe(self, acc, values):
        return super().observe(acc if acc["sum"] else self.zero(), values)


class MovesToTheCpu(Count):
    def observe(self, acc, values):
        return super().observe(acc, values.cpu())


class Lists(Count):
    def observe(self, acc, values):
        return super().observe(acc, torch.tensor(values.tolist()))


LIARS = {
    MakesUpZeroForPadding: r"a batch in which nothing counts is absent: the result of nothing\[0\]: expected None, found 0.0",
    MakesUpZeroForNoRows: "an empty batch is absent: the result of sample 0 without its rows: expected None, found 0.0",
    SwallowsNan: "nan is not swallowed: sample 0, where row 0 is NaN in output .*, has the result 7.*, and no leaf",
    LeavesNanOut: "nan is not swallowed: sample 0, where row 0 is NaN",
    Waits: "no device is waited for: sample 0 on the device meta, which has shapes and no values: .*item",
    LooksAtOne: "no device is waited for: sample 0 on the device meta",
    MovesToTheCpu: "no device is waited for: sample 0 on the device meta",
    Lists: "no device is waited for: sample 0 on the device meta",
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
    Remembers: "the accumulator is all there is: the result of an equal metric: expected",
    ShowsTensors: "results are plain: result of sample 0 is Tensor, not a Python number",
    SideBySide: "merging is associative: ",
    Opaque: r"accumulators are trees of int64 tensors: zero\(\) is Stranger, not an int64 tensor",
}


def copies(liar=Count):
    masked = issubclass(liar, Masked)
    return [
        (sample.clone(), torch.ones(len(sample), dtype=torch.bool)) if masked else sample.clone() for sample in SAMPLES
    ]


NOTHING = (torch.rand(3), torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.__name__)
def test_a_metric_that_lies_is_found_out_by_the_rule_that_it_breaks(liar):
    with pytest.raises(ContractBroken, match=LIARS[liar]):
        check_metric(liar, copies(liar), nothing=[NOTHING] if issubclass(liar, Masked) else ())


@pytest.mark.parametrize("honest", [Count, M.Mean, M.Variance, M.Min], ids=lambda honest: honest.__name__)
def test_an_honest_metric_passes(honest):
    check_metric(honest, copies())
    batch_invariant(honest(), torch.cat(SAMPLES))


@pytest.mark.parametrize("liar", [MeanOfBatchMeans, Float32, Last, FloatLeaf])
def test_what_changes_with_the_batches_breaks_the_law_of_batches(liar):
    """Q01: the message says how the samples were split into batches and ranks."""
    values = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        LawBroken, match=r"batch invariance: \w+: .* against .*; batches of \[\[.*\]\] rows, a list for each rank"
    ):
        batch_invariant(liar(), values)


def test_an_order_that_only_ranks_show_is_found():
    """The metric is right on one rank, in any order of batches, and wrong when ranks are merged."""

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


class MeanOfDicts(MeanOfBatchMeans):
    def observe(self, acc, batch):
        return super().observe(acc, batch["values"])


class MeanOfTotals(MeanOfBatchMeans):
    """It has the count, but does not use it."""

    def observe(self, acc, values, count):
        return super().observe(acc, values)


UNCUT = {
    "a count": [(torch.rand(n), n) for n in (4, 7, 2)],
    "a total": [(torch.rand(n).sum(), torch.ones(n)) for n in (4, 7, 2)],
    "totals": [torch.tensor(3.0), torch.tensor(4.0), torch.tensor(5.0)],
    "numbers": [1.0, 2.0, 3.0],
    "other sizes": [(torch.zeros(2), torch.zeros(3))] * 3,
    "a row": [torch.rand(1), torch.rand(1), torch.rand(1)],
    "no rows": [torch.rand(0)] * 3,
    "nothing": [()] * 3,
    "an array": [(torch.rand(3), np.ones(3))] * 3,
}


@pytest.mark.parametrize("samples", UNCUT.values(), ids=UNCUT)
def test_what_cannot_be_cut_is_no_evidence(samples):
    """A mean of batch means used to pass if no batch could be split; a law about parts must see parts."""
    for doing in (lambda: check_metric(MeanOfTotals, samples), lambda: batch_invariant(MeanOfTotals(), samples[0])):
        with pytest.raises(InvalidArgument, match="expected two rows or more that can be cut") as caught:
            doing()
        assert "torch.ones" in caught.value.fix


def test_a_mean_of_batch_means_is_found_in_outputs_of_any_form():
    sizes = (4, 7, 2)
    with pytest.raises(ContractBroken, match="a split batch is its parts"):
        check_metric(MeanOfTotals, [(torch.rand(n), torch.ones(n)) for n in sizes])
    with pytest.raises(ContractBroken, match="a split batch is its parts"):
        check_metric(MeanOfDicts, [{"values": torch.rand(n), "name": "it", "more": [torch.rand(n, 2)]} for n in sizes])
    with pytest.raises(ContractBroken, match="a split batch is its parts"):
        check_metric(MeanOfTotals, [torch.rand(n) for n in sizes], outputs_of=lambda values: (values, len(values)))
    with pytest.raises(ContractBroken, match="a split batch is its parts: sample 1"):
        check_metric(MeanOfTotals, [(torch.rand(4), 4), (torch.rand(5), torch.ones(5)), (torch.rand(2), 2)])
    with pytest.raises(LawBroken, match="batch invariance"):
        batch_invariant(MeanOfDicts(), {"values": torch.rand(4), "more": [torch.rand(4, 2)]})
    with pytest.raises(LawBroken, match="batch invariance"):
        batch_invariant(MeanOfTotals(), torch.rand(4), outputs_of=lambda values: (values, len(values)))


def test_totals_are_checked_where_they_are_made():
    """The result of `forward` for a part cannot be split, but its inputs can. This also finds a sum in float32."""
    batches = [torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in (40, 70, 20)]

    def exact(losses):
        return losses.double(), len(losses)

    check_metric(M.Ratio, batches, outputs_of=exact)
    batch_invariant(M.Ratio(), torch.cat(batches), outputs_of=exact)
    for law in (
        lambda: check_metric(M.Ratio, batches, outputs_of=lambda losses: (losses.sum(), len(losses))),
        lambda: batch_invariant(M.Ratio(), torch.cat(batches), outputs_of=lambda losses: [losses.sum(), len(losses)]),
    ):
        with pytest.raises((ContractBroken, LawBroken)):
            law()


def test_outputs_with_a_graph_are_observed_like_any_others():
    weights = torch.ones((), requires_grad=True)
    batches = [weights * sample for sample in SAMPLES]
    check_metric(M.Mean, batches)
    batch_invariant(M.Mean(), weights * torch.cat(SAMPLES), max_examples=5)
    assert batches[0].grad_fn is not None

    class OnNumpy(Count):
        def observe(self, acc, values):
            return super().observe(acc, torch.from_numpy(values.numpy()))

    check_metric(OnNumpy, batches, except_for=["no device is waited for"])


@pytest.mark.parametrize("liar", [Waits, LooksAtOne, MovesToTheCpu, Lists])
def test_a_rule_that_a_metric_breaks_knowingly_is_left_out(liar):
    check_metric(liar, copies(), except_for=["no device is waited for"])
    with pytest.raises(InvalidArgument, match=r"names of rules: .*, no device is waited for, .*found.*waits"):
        check_metric(liar, copies(), except_for=["it waits"])


def test_a_swallowed_nan_is_all_that_is_wrong():
    for liar in (SwallowsNan, LeavesNanOut):
        check_metric(liar, copies(), except_for=["nan is not swallowed"])
    check_metric(
        MakesUpZeroForPadding, copies(MakesUpZeroForPadding)
    )  # the check cannot know which argument is the mask


def test_a_nan_that_is_masked_has_no_say():
    metric, mask = M.PositionAccuracy(), torch.tensor([[True, False], [True, True], [False, False]])
    samples = [(torch.rand(3, 2), mask), (torch.rand(2, 2), mask[1:]), (torch.rand(1, 2), mask[:1])]
    check_metric(lambda: metric, samples, nothing=[(torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.bool))])


def test_there_has_to_be_something_to_compare():
    for count in (0, 1, 2):
        with pytest.raises(InvalidArgument, match="samples: expected three or more"):
            check_metric(M.Mean, SAMPLES[:count])
    with pytest.raises(InvalidArgument, match="max_examples: expected one or more"):
        batch_invariant(M.Mean(), torch.rand(3), max_examples=0)


def test_tuples_dicts_and_exact_sums_make_a_metric_of_ones_own():
    """The metric from the how-to page: weights beside the count."""

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
    cut = (torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    check_metric(M.Ratio, [(torch.tensor([1.0, 2.0]), 2), (0.5, torch.tensor([True, False])), (1, 3), cut])


def test_accumulators_of_another_structure_are_named():
    class Grows(Count):
        def observe(self, acc, values):
            return {**super().observe(acc, values), "last": torch.tensor(0)}

        def merge(self, one, other):
            return {name: one[name] + other[name] for name in ("sum", "count")}

    with pytest.raises(ContractBroken, match=r"zero is neutral: .* the trees are "):
        check_metric(Grows, copies())


class ByName:
    """Counts hits by source name, with one leaf per name."""

    additive = False

    def zero(self):
        return {}

    def observe(self, acc, name, hits):
        return {**acc, name: acc.get(name, 0) + hits.sum()}

    def merge(self, one, other):
        return {name: sum(acc[name].cpu() for acc in (one, other) if name in acc) for name in sorted({**one, **other})}

    def result(self, acc):
        return {name: int(hits) for name, hits in sorted(acc.items()) if int(hits)} or None


class AddsUpNames(ByName):
    additive = True


def test_accumulators_with_keys_of_the_data_are_merged_and_never_added_leaf_by_leaf():
    """Q03: added leaf by leaf, one source's hits would be counted for another."""
    samples = [("wiki", torch.tensor([1, 2])), ("code", torch.tensor([4, 5])), ("web", torch.tensor([6, 7]))]
    check_metric(ByName, samples)
    with pytest.raises(ContractBroken, match=r"1 of 15 rules are broken:\s+additive is the truth"):
        check_metric(AddsUpNames, samples)

"""Which source each tensor of a model comes from: whatever the sources have, it is one of them, the script, or a problem that is named before anything is read."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold import attach
from trainfold.core.errors import InvalidArgument, InvalidState, SourceFailed, WeightsRefused
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.slices import whole_box
from trainfold.core.weights.several.cover import cover
from trainfold.core.weights.several.load_spec import LoadSpec
from trainfold.core.weights.several.several_sources import SeveralSources, specs_of
from trainfold.core.weights.several.source_text import described, pinned
from trainfold.core.weights.source import Wanted
from trainfold.core.weights.wrapped import ByScript, Cast, Frozen, Renamed
from trainfold.weights import take_weights

MODEL = "abcdef"
FORMS = (LeafSpec("float32", (2,)), LeafSpec("float32", (3,)), LeafSpec("bfloat16", (2,)))


class Has:
    """A source that lists forms, and supplies a number that is its own."""

    def __init__(self, number, forms):
        self.number, self.forms, self.asked = number, forms, []

    def __repr__(self):
        return f"Has({self.number})"

    def specs(self):
        return self.forms

    def supply(self, wanted):
        self.asked += list(wanted)
        return ((name, torch.full((2,), float(self.number))) for name in wanted)


def wanted(names=MODEL, ties=()):
    found = {name: Wanted("float32", (2,), whole_box((2,))) for name in names}
    return found | {alias: Wanted("float32", (2,), whole_box((2,)), tied_to=name) for alias, name in ties}


@st.composite
def some_specs(draw, forms=FORMS):
    specs = []
    for number in range(draw(st.integers(1, 4))):
        has = draw(st.dictionaries(st.sampled_from("abcdefxyz"), st.sampled_from(forms), max_size=5))
        names = draw(st.none() | st.sets(st.sampled_from("abcdefx"), min_size=1, max_size=4))
        mode = draw(st.sampled_from(("used", "filled", "exact", "any")))
        specs.append(LoadSpec(Has(number, has), names=names, strict=mode, overrides=draw(st.booleans())))
    if draw(st.booleans()):
        specs.append(LoadSpec(ByScript(), names=draw(st.none() | st.just(["f"]))))
    return specs


def plain(specs):
    """The same decision, a tensor at a time: (owner of each tensor, whether anything is wrong)."""
    owners, wrong, many = {}, False, len(specs) > 1
    for tensor in MODEL:
        for index, spec in enumerate(specs):
            is_script = isinstance(spec.source, ByScript)
            has = (
                spec.names is not None and spec.takes(tensor)
                if is_script
                else tensor in spec.source.forms and spec.takes(tensor)
            )
            if has:
                wrong |= tensor in owners and not spec.overrides
                owners[tensor] = owners[tensor] if tensor in owners and not spec.overrides else index
        rest = [index for index, spec in enumerate(specs) if spec.is_rest]
        if tensor not in owners and rest:
            owners[tensor] = rest[0]
        wrong |= tensor not in owners
    for index, spec in enumerate(specs):
        if isinstance(spec.source, ByScript):
            continue
        mine = {name for name in spec.source.forms if spec.takes(name)}
        wrong |= any(spec.source.forms[name] != FORMS[0] for name, owner in owners.items() if owner == index)
        if many:
            wrong |= spec.strict in ("used", "exact") and bool(mine - set(MODEL))
            wrong |= spec.strict in ("filled", "exact") and any(spec.takes(name) and name not in mine for name in MODEL)
            wrong |= not mine & set(MODEL)
    return owners, wrong


@given(some_specs())
def test_each_tensor_comes_from_one_source_from_the_script_or_is_a_problem(specs):
    """L01: later sources override or must be disjoint, by declaration. L02: each tensor records its source. V10: in each mode what does not fit is refused, and one that has no tensor of the model too."""
    owners, wrong = plain(specs)
    coverage = cover(specs, wanted())
    fills = [(name, index) for index, use in enumerate(coverage.uses) for name in use.fills]
    assert dict(fills) == owners
    assert len(fills) == len(owners)
    assert bool(coverage.problems) == wrong
    assert set(coverage.sources) == set(owners)
    script = {index for index, spec in enumerate(specs) if isinstance(spec.source, ByScript)}
    assert set(coverage.by_script) == {name for name, owner in owners.items() if owner in script}
    for index, (spec, use) in enumerate(zip(specs, coverage.uses, strict=True)):
        if index not in script:
            has = {name for name in spec.source.forms if spec.takes(name)}
            parts = [set(use.fills), set(use.unused), has & set(MODEL) - set(use.fills)]
            assert set.union(*parts) == has
            assert sum(map(len, parts)) == len(has)
    assert all(str(each) in str(coverage) for each in coverage.problems)


@given(some_specs(forms=FORMS[:1]))
def test_what_is_supplied_is_what_was_decided_and_no_source_is_asked_for_more(specs):
    """L01, L02: a source is not asked for what another one supplies, and the script's tensors are asked of none."""
    coverage = cover(specs, wanted())
    if coverage.overlaps:
        with pytest.raises(InvalidState, match="expected one source"):
            dict(SeveralSources(specs).supply(wanted()))
        return
    pairs = list(SeveralSources(specs).supply(wanted()))
    taken = {name: int(each[0]) for name, each in pairs}
    assert len(pairs) == len(taken)
    expected = {name: index for index, use in enumerate(coverage.uses) for name in use.fills}
    assert taken == {name: index for name, index in expected.items() if name not in coverage.by_script}
    for index, (spec, use) in enumerate(zip(specs, coverage.uses, strict=True)):
        if isinstance(spec.source, Has):
            assert sorted(spec.source.asked) == sorted(use.fills), index


def test_all_problems_are_named_at_once_with_their_sources():
    """V10: missing, unexpected, shape and dtype. P20: another dtype is not rounded in silence."""
    specs = [
        LoadSpec(Has(0, {"a": FORMS[1], "b": FORMS[2], "old": FORMS[0]})),
        LoadSpec(Has(1, {"a": FORMS[0]})),
        LoadSpec(Has(2, {"y": FORMS[0]}), strict="any"),
        LoadSpec(Has(3, {"c": FORMS[0]}), names=["c", "d"], strict="exact"),
    ]
    with pytest.raises(WeightsRefused) as caught:
        cover(specs, wanted()).check()
    said = str(caught.value)
    for text in (
        "weights['a']: expected one source, found Has(0) and Has(1)",
        "weights['a'] from Has(0): expected the shape [2], found [3]",
        "weights['b'] from Has(0): expected float32, found bfloat16",
        "weights from Has(0): expected tensors of the model alone, found old",
        "weights from Has(2): expected tensors of the model, such as a, b, c, d, e, f, found none among 1: y",
        "weights from Has(3): expected every tensor that it is for, found nothing for d",
        "expected all 6 tensors from 4 sources, found nothing for d, e, f",
    ):
        assert text in said
    assert len(caught.value.reasons) == 7


def test_a_cast_is_in_the_plan_with_the_dtype_that_it_rounds():
    """P20: declared, and said."""
    specs = [LoadSpec(Cast(Has(0, {"a": FORMS[2], "b": FORMS[0]}))), LoadSpec(ByScript())]
    coverage = cover(specs, wanted("abc"))
    assert coverage.uses[0].rounded == {"a": "bfloat16"}
    assert "1 of them rounded from bfloat16" in str(coverage)
    assert coverage.problems == ()
    integers = cover([LoadSpec(Cast(Has(0, {"a": LeafSpec("int64", (2,))})))], wanted("a"))
    assert "expected float32, found int64" in str(integers.problems[0])


@given(some_specs())
def test_a_cast_around_a_list_is_one_around_each_of_its_sources(specs):
    """L01, V10: what the list asks of its sources is asked in it too. L02: each tensor records the one that it comes from, and not the list."""
    around = cover(specs_of(Cast(SeveralSources(specs))), wanted())
    each = [
        spec if isinstance(spec.source, ByScript) else attrs.evolve(spec, source=Cast(spec.source)) for spec in specs
    ]
    assert str(around) == str(cover(each, wanted()))
    assert {source for source in around.sources.values() if source != "ByScript()"} <= {f"Cast(Has({n}))" for n in range(4)}  # fmt: skip


def test_quantised_numbers_are_not_rounded_with_or_without_a_cast():
    """P20, K04: without their scales they are other weights."""
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for source in (Has(0, {"a": LeafSpec(dtype, (2,))}), Cast(Has(0, {"a": LeafSpec(dtype, (2,))}))):
            (problem,) = cover([LoadSpec(source)], wanted("a")).problems
            assert f"expected float32, found {dtype}; multiply it by its scales" in str(problem)

    class Unlisted:
        def supply(self, wanted):
            yield "a", torch.ones(2).to(torch.float8_e4m3fn)

    state = attach(torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(2))})).capture()
    with pytest.raises(InvalidState, match="found float8_e4m3fn; multiply it by its scales"):
        take_weights(state, Cast(Unlisted()))


def test_one_name_of_a_tied_tensor_is_enough_and_two_sources_for_it_overlap():
    """P23: also where each of the two has another name of it."""
    ties = (("head", "a"),)
    alone = cover([LoadSpec(Has(0, {"head": FORMS[0]}))], wanted("a", ties))
    assert (alone.problems, alone.uses[0].fills, alone.uses[0].names) == ((), ("a",), ("head",))
    both = [LoadSpec(Has(0, {"a": FORMS[0]})), LoadSpec(Has(1, {"head": FORMS[0]}))]
    assert "weights['a']: expected one source" in str(cover(both, wanted("a", ties)).problems[0])


def test_several_sources_list_what_they_have_together():
    """L01: also without a model, for an export: an overlap is declared or refused."""
    one, other = Has(0, {"a": FORMS[0], "b": FORMS[0]}), Has(1, {"b": FORMS[1], "c": FORMS[1]})
    with pytest.raises(InvalidState, match=r"weights\['b'\]: expected one source, found Has\(1\)"):
        SeveralSources([one, other]).specs()
    assert SeveralSources([one, LoadSpec(other, overrides=True)]).specs()["b"] == FORMS[1]
    assert set(SeveralSources([one, LoadSpec(other, names="c")]).specs()) == set("abc")


def test_a_source_that_lists_nothing_says_what_it_is_for():
    class Mine:
        def supply(self, wanted):
            return ((name, torch.ones(2)) for name in wanted)

    with pytest.raises(InvalidState, match=r"found Mine\(\); say what it is for: LoadSpec\(source, names=...\)"):
        cover([LoadSpec(Mine()), LoadSpec(Has(0, {"b": FORMS[0]}))], wanted("ab"))
    coverage = cover([LoadSpec(Mine(), names="a"), LoadSpec(Has(0, {"b": FORMS[0]}))], wanted("ab"))
    assert coverage.problems == ()
    assert "not listed" in str(coverage.uses[0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LoadSpec("models/base"), "LoadSpec.source: expected a WeightSource"),
        (lambda: LoadSpec(Frozen(ByScript())), r"Frozen\(SeveralSources"),
        (lambda: LoadSpec(ByScript(), strict="strict"), "one of \\(.used., .filled., .exact., .any.\\)"),
        (lambda: LoadSpec(ByScript(), names="head.{"), "a brace is not closed"),
        (lambda: SeveralSources(["models/base"]), "LoadSpec.source: expected a WeightSource"),
        (
            lambda: LoadSpec(Cast(SeveralSources([ByScript()]))),
            "LoadSpec.source: expected one source, found Cast; write one list",
        ),
        (
            lambda: Renamed(SeveralSources([ByScript()]), str),
            "Renamed.source: expected one source, found SeveralSources; rename each",
        ),
        (lambda: Cast(ByScript()), r"Cast.source: .*found ByScript; list it beside"),
        (lambda: Renamed(Frozen(ByScript()), str), r"Renamed.source: .*found Frozen; put it around"),
    ],
)
def test_mistakes_are_errors_where_the_list_is_written(make, said):
    """K09."""
    with pytest.raises(InvalidArgument, match=said):
        make()


def test_an_error_of_the_list_of_a_source_names_the_source():
    """J03."""

    class Gone(Has):
        def specs(self):
            raise OSError("no route to host")

    with pytest.raises(SourceFailed, match=r"weights from Gone: .*no route to host"):
        cover([LoadSpec(Cast(Gone(0, {})))], wanted())


def test_a_source_is_pinned_wherever_it_is_wrapped_and_described_without_addresses():
    class Moves:
        def __init__(self, step=None):
            self.step = step

        def __repr__(self):
            return f"Moves({self.step})"

        def pinned(self):
            return Moves(4)

        def supply(self, wanted):
            return iter(())

    source = SeveralSources([LoadSpec(Cast(Renamed(Moves(), str.lower)), names="a"), ByScript()])
    assert "Moves(4)" in described(pinned(source))
    assert "Moves(None)" in described(source)
    assert " at 0x" not in described(Renamed(Moves(), lambda name: name))


def test_an_empty_list_of_sources_is_refused():
    """L02: it would give nothing in silence."""
    with pytest.raises(InvalidArgument, match="expected one source or more, found an empty list"):
        SeveralSources([])

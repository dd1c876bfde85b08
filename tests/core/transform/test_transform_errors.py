"""What transforms refuse: when they are made, and when they meet tensors of another form. Errors name the tensor, and nothing is computed before."""

import re

import pytest
import torch

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.transform.apply import plan_parts, transform_specs, transform_stream, transform_tensors
from trainfold.core.transform.converters.lora import lora_of
from trainfold.core.transform.families.hub_rules import dequantise_of, hub_rules_of
from trainfold.core.transform.fusing import merge, split, stack, unstack
from trainfold.core.transform.name_template import template
from trainfold.core.transform.naming import Rename, drop, keep, rename, tie, untie
from trainfold.core.transform.transform import compose
from trainfold.core.transform.values import cast, dequantise, rearrange


def specs(**shapes):
    return {name.replace("_", "."): LeafSpec("float32", shape) for name, shape in shapes.items()}


W = {"w": LeafSpec("float32", (4, 6))}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MADE = {
    "an empty template": (lambda: template(""), "it is empty"),
    "an open brace": (lambda: template("layers.{i.w"), "a brace is not closed"),
    "a capture without a name": (lambda: template("layers.{}.w"), "not the name of a capture"),
    "a capture twice": (lambda: template("{i}.{i}"), "a capture has two places"),
    "two captures with dots": (lambda: template("{a*}.{b*}"), "two captures may have dots"),
    "two captures in a part": (lambda: template("x.{a}_{b}"), "one part between dots"),
    "a capture that is lost": (lambda: rename("layers.{i}.w", "w"), "layers.{i}.w: i"),
    "a star that is lost": (lambda: rename("{path*}.w", "{path}.w"), "{path*}.w: path*"),
    "a tie of others": (lambda: tie("head.{i}", "embed"), "the captures of head.{i}"),
    "a tie to itself": (lambda: tie("w", "w"), "tie: expected a name, and another one that stays, found w twice"),
    "an untie from itself": (lambda: untie("e.{i}", "e.{i}"), "e.{i} twice"),
    "one part": (lambda: merge(["q"], "qkv"), "1 parts"),
    "a part twice": (lambda: merge(["q", "q"], "qkv"), "each once"),
    "shares for other parts": (lambda: split("qkv", ["q", "k"], shares=[1]), "1 shares"),
    "no share": (lambda: merge(["q", "k"], "qk", shares=[1, 0]), "merge.shares"),
    "no groups": (lambda: merge(["q", "k"], "qk", groups=0), "merge.groups"),
    "a stack over nothing": (lambda: stack("e.{i}.w", "e.{i}.w", over="i"), "without 'i'"),
    "a stack over another": (lambda: unstack("e.w", "e.{i}.w", over="j"), "without 'j'"),
    "other axes": (lambda: rearrange("w", "a b -> a c"), "the same axes"),
    "an axis twice": (lambda: rearrange("w", "a a -> a a"), "each once"),
    "no arrow": (lambda: rearrange("w", "a b"), "the same axes"),
    "an open parenthesis": (lambda: rearrange("w", "(a b -> a b"), "the same axes"),
    "a size that is missing": (lambda: rearrange("w", "(a b) -> (b a)"), "pass a="),
    "a size that is missing on the other side": (lambda: rearrange("w", "a b -> (a b)"), "pass a="),
    "a size of no axis": (lambda: rearrange("w", "a b -> b a", c=2), "c=2"),
    "a size of zero": (lambda: rearrange("w", "(a b) -> (b a)", a=0), "a=0"),
    "a dtype of torch": (lambda: cast("torch.bfloat16"), "without torch."),
    "a dtype of integers": (lambda: cast("int8"), "'int8'"),
    "a number for a name": (lambda: rename(3, "a"), "template: expected a name with captures"),
    "a number for names": (lambda: keep(3), "found 3"),
    "a text for a transform": (
        lambda: compose(rename("a", "b"), "llama"),
        "compose: expected a transform, found 'llama'",
    ),
    "a class for a transform": (lambda: compose(Rename), "compose: expected a transform"),
    "the inverse of one without": (
        lambda: compose(cast("float16").inverse),
        "the inverse of one without an inverse is None",
    ),
    "a text for a dimension": (
        lambda: merge(["a", "b"], "c", dim="0"),
        "merge.dim: expected an int in [-64, 64), found '0'",
    ),
    "half a dimension": (lambda: split("c", ["a", "b"], dim=1.5), "merge.dim: expected an int in [-64, 64), found 1.5"),
    "a number for shares": (
        lambda: merge(["a", "b"], "c", shares=2),
        "merge.shares: expected a number for each part, found 2",
    ),
    "a stack over names with dots": (lambda: stack("e.{i*}.w", "e.w", over="i*"), "without 'i*'"),
    "a float for a size": (lambda: rearrange("w", "(a b) -> (b a)", a=2.0), "found a=2.0"),
    "a text for a size": (lambda: rearrange("w", "(a b) -> (b a)", a="2"), "found a='2'"),
    "a number for a pattern": (lambda: rearrange("w", 3), "pattern: expected the same axes on both sides of ->"),
    "a number for blocks": (
        lambda: dequantise("w", "s", block=128),
        "dequantise.block: expected a size for each dimension, found 128; pass (128, 128)",
    ),
    "no dtype of a product": (lambda: dequantise("w", "s", dtype=None), "dequantise.dtype: expected one of float16"),
    "a text for tensors' transform": (lambda: transform_tensors("llama", {}), "transform: expected a transform"),
    "a tuple for a spec": (
        lambda: transform_specs(compose(), {"w": ("float32", (2,))}),
        "specs['w']: expected a dtype and a shape",
    ),
    "a sparse tensor": (
        lambda: transform_tensors(compose(), {"w": torch.eye(2).to_sparse()}),
        "tensors['w']: expected a dense tensor, found torch.sparse_coo",
    ),
    "a number for a tensor": (
        lambda: transform_tensors(compose(), {"w": 3}),
        "tensors['w']: expected a dense tensor, found 3",
    ),
    "a box of another tensor": (
        lambda: plan_parts(compose(), W, {"w": ((0, 3),)}),
        "wanted['w']: expected a (start, stop) pair for each dimension of [4, 6]",
    ),
    "a box beyond a tensor": (lambda: plan_parts(compose(), W, {"w": ((0, 5), (0, 4))}), "found ((0, 5), (0, 4))"),
    "a box from its end": (lambda: plan_parts(compose(), W, {"w": ((2, 1), (0, 4))}), "found ((2, 1), (0, 4))"),
    "a number for a box": (
        lambda: plan_parts(compose(), W, {"w": None}, held={"w": 3}),
        "held['w']: expected a (start, stop) pair",
    ),
    "a tensor that is held and unknown": (
        lambda: plan_parts(compose(), W, {"w": None}, held={"v": None}),
        "held: expected names of 1 tensors, such as w, found v",
    ),
    "a path for a configuration": (
        lambda: hub_rules_of("config.json"),
        "hub_rules_of.config: expected a mapping from text, as json reads it, found 'config.json'",
    ),
    "no configuration": (lambda: hub_rules_of(None), "hub_rules_of.config"),
    "no configuration of a quantisation": (lambda: dequantise_of([1]), "dequantise_of.config"),
    "a quantisation to another dtype": (
        lambda: dequantise_of({"torch_dtype": "auto", **FP8}),
        "config.torch_dtype: expected one of float16, bfloat16, float32, float64, found 'auto'",
    ),
    "a quantisation in other blocks": (
        lambda: dequantise_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": ["a"]}}),
        "config.quantization_config.weight_block_size",
    ),
    "no configuration of an adapter": (lambda: lora_of(None), "lora_of.config: expected a mapping"),
    "a list of patterns": (lambda: lora_of({"alpha_pattern": ["q"]}), "lora.alphas: expected a mapping"),
    "a block of nothing": (lambda: dequantise("w", "s", block=(0, 1)), "dequantise.block"),
}


@pytest.mark.parametrize("case", MADE)
def test_an_argument_that_cannot_work_is_refused_when_it_is_made(case):
    """K09: user errors are errors at configuration time."""
    make, text = MADE[case]
    with pytest.raises(InvalidArgument, match=re.escape(text)) as found:
        make()
    assert found.value.expected
    assert found.value.fix


def test_a_dtype_of_null_is_none():
    assert str(dequantise_of({"dtype": None, "torch_dtype": "float32", **FP8})).endswith("to float32 (no inverse)")


MET = {
    "two of one name": (compose(rename("a", "c"), rename("b", "c")), specs(a=(1,), b=(1,)), "no other tensor of the form c, found c"),
    "two that are renamed to one": (untie("a", "b"), specs(a=(1,), b=(1,)), "no a beside b"),
    "one that has the name already": (rename("layers.{i}.w", "h.{i}.w"), specs(h_0_w=(1,)), "found h.0.w"),
    "a part that is missing": (merge(["{i}.q", "{i}.k"], "{i}.qk"), specs(a_q=(2,), b_q=(2,), b_k=(2,)), "no a.k"),
    "a part of another width": (merge(["q", "k"], "qk"), specs(q=(2, 3), k=(2, 4)), "k: expected float32[2, 3], beside q, found float32[2, 4]"),
    "parts of other shares": (merge(["q", "k"], "qk", shares=(2, 1)), specs(q=(3,), k=(1,)), "q: expected float32[2], beside q, found float32[3]"),
    "groups that do not divide": (merge(["q", "k"], "qk", groups=2), specs(q=(3,), k=(3,)), "q: expected a multiple of 2"),
    "a dimension that is missing": (merge(["q", "k"], "qk", dim=1), specs(q=(3,), k=(3,)), "q: expected a dimension 1"),
    "a whole that cannot be cut": (split("qkv", ["q", "k", "v"]), specs(qkv=(4, 2)), "qkv: expected a multiple of 3"),
    "a whole beside a part": (split("qk", ["q", "k"]), specs(qk=(4,), v=(1,), q=(2,)), "found q"),
    "a gap between experts": (stack("e.{n}", "e", over="n"), specs(e_0=(1,), e_2=(1,)), "each {n} of 0 to 1, found 0, 2"),
    "experts of two shapes": (stack("e.{n}", "e", over="n"), specs(e_0=(1,), e_1=(2,)), "float32[2] for 1"),
    "a stack that is there already": (stack("l.{i}.e.{n}", "l.{i}.e", over="n"), specs(l_0_e_0=(1,), l_7_e=(2,)), "no other tensor of the form l.{i}.e, found l.7.e"),
    "a part that is there already": (unstack("l.{i}.e", "l.{i}.e.{n}", over="n"), specs(l_0_e=(2,), l_7_e_0=(1,)), "no other tensor of the form l.{i}.e.{n}, found l.7.e.0"),
    "a stack of scalars": (unstack("e", "e.{n}", over="n"), specs(e=()), "a first dimension"),
    "other heads": (rearrange("w", "(h d) -> (d h)", h=3), specs(w=(4,)), "w: expected a tensor that can be read as (h d)"),
    "other dimensions": (rearrange("w", "a b -> b a"), specs(w=(4,)), "found [4]"),
    "a tie without the other": (tie("head", "embed"), specs(head=(1,)), "and nothing there"),
    "a tie without an alias": (tie("head", "embed"), specs(embed=(1,)), "found nothing"),
    "a tie of two shapes": (tie("head", "embed"), specs(head=(1,), embed=(2,)), "float32[1], and float32[2] there"),
    "a tie of captures that are equal": (tie("{a}.{b}", "{b}.{a}"), specs(x_x=(1,)), "x.x: expected another tensor that stays"),
    "an int8 weight whose scales have another name": (dequantise("{m}.w", "{m}.s"), {"a.w": LeafSpec("int8", (1, 1)), "a.scale": LeafSpec("float32", (1, 1))}, "none for a.w"),
    "a scale without a weight": (dequantise("w", "s"), specs(s=(1, 1)), "beside nothing"),
    "scales of other blocks": (dequantise("w", "s"), specs(s=(1, 1)) | {"w": LeafSpec("float8_e4m3fn", (129, 1))}, "float32[1, 1] beside float8_e4m3fn[129, 1]"),
    "a weight that is not quantised": (dequantise("w", "s"), specs(s=(1, 1), w=(2, 2)), "beside float32[2, 2]"),
    "a quantised weight without scales": (dequantise("{m}.w", "{m}.s"), {"a.w": LeafSpec("float8_e4m3fn", (1, 1))}, "none for a.w"),
}  # fmt: skip


@pytest.mark.parametrize("case", MET)
def test_tensors_of_another_form_are_refused_by_name_before_anything_is_read(case):
    """K01, K09: on specs and on tensors alike."""
    transform, found, text = MET[case]
    with pytest.raises(InvalidState, match=re.escape(text)):
        transform_specs(transform, found)
    with pytest.raises(InvalidState, match=re.escape(text)):
        transform_stream(transform, found, lambda *_: pytest.fail("it has read"))


def test_weights_that_only_used_to_be_tied_are_found_when_they_are_computed():
    """B19: bit by bit, so that zeros of two signs and two kinds of NaN differ too."""
    tensors = {"embed": torch.zeros(4), "head": torch.zeros(4)}
    assert list(dict(transform_tensors(tie("head", "embed"), tensors))) == ["embed"]
    tensors["head"][3] = -0.0
    stream = transform_tensors(tie("head", "embed"), tensors)
    with pytest.raises(InvalidState, match="head: expected the values of embed"):
        dict(stream)


def test_what_is_selected_is_what_has_a_form():
    found = specs(layers_0_w=(1,), layers_0_b=(1,), head=(1,))
    assert list(transform_specs(keep(["layers.{i}.w", "head"]), found)) == ["layers.0.w", "head"]
    assert list(transform_specs(drop("layers.{path*}"), found)) == ["head"]
    assert drop("x").inverse is keep("x").inverse is cast("float16").inverse is dequantise("w", "s").inverse is None
    assert compose(rename("a", "b"), drop("x")).inverse is None


def test_parts_that_a_rank_holds_are_told_from_those_that_it_needs_of_others():
    """K01: rows of a transposed matrix are columns; half a head is not, where the elements of a head change places."""
    found = specs(w=(8, 6))
    pairs = rearrange("w", "(h two d) i -> (h d two) i", h=2, two=2)
    (whole_head,) = plan_parts(pairs, found, {"w": ((4, 8), (0, 6))}, held={"w": ((4, 8), (0, 6))})
    (half,) = plan_parts(pairs, found, {"w": ((2, 4), (0, 6))}, held={"w": ((2, 4), (0, 6))})
    assert (whole_head.is_gathered, half.is_gathered) == (False, True)
    assert str(half) == "w [2:4, 0:6]: gathered, of w [0:4, 0:6]"
    (nothing,) = plan_parts(pairs, found, {"w": ((0, 0), (0, 6))}, held={})
    assert (nothing.needed, nothing.is_gathered) == (0, False)
    with pytest.raises(InvalidArgument, match="found other"):
        plan_parts(pairs, found, {"other": None})


def test_a_transform_says_all_that_it_does():
    both = compose(
        merge(["{i}.q", "{i}.k"], "{i}.qk", dim=-1, shares=(4, 1), groups=2),
        stack("e.{n}", "e", over="n"),
        rearrange(["a", "b"], "(h d) -> (d h)", h=2),
        cast("bfloat16", without="{n}.bias"),
        tie("head", "embed"),
    )
    assert str(both).splitlines() == [
        "merge {i}.q + {i}.k = {i}.qk, dim -1 as 4:1 in 2 groups",
        "stack e.{n} over n = e",
        "rearrange a, b: (h d) -> (d h), h=2",
        "cast floating tensors but {n}.bias to bfloat16 (no inverse)",
        "tie head to embed",
    ]


@pytest.mark.parametrize("payload", ["float8_e4m3fn", "int8", "uint8", "int32"])
def test_what_is_beside_a_quantised_matrix_is_not_rounded(payload):
    """K04: scales, whatever they are called. Beside integers of one dimension, and where it is asked for by name, it is."""
    found = {
        "a.weight": LeafSpec(payload, (4, 4)), "a.weight_scale_inv": LeafSpec("float32", (1, 1)), "a.scales": LeafSpec("float16", (4,)), "a.bias": LeafSpec("float32", (4,)),
        "b.weight": LeafSpec("float32", (4, 4)), "b.ids": LeafSpec(payload, (4,)), "norm": LeafSpec("float32", (4,)),
    }  # fmt: skip
    changed = {"a.bias", "b.weight", "norm"}
    cut = transform_specs(cast("bfloat16"), found)
    assert {name for name, each in cut.items() if each != found[name]} == changed
    assert transform_specs(cast("bfloat16", only="a.scales"), found)["a.scales"].dtype == "bfloat16"

"""Laws of the tables of rules over random sizes: what comes is what the hub has, all of it comes back, and wrong numbers are refused."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from kit.core.hub_family_cases import FAMILIES, WITH_TIES, Sizes, at_hub, native, sizes_of

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.transform.apply import plan_parts, transform_specs, transform_tensors
from trainfold.core.transform.expression import SourceTensor
from trainfold.core.transform.families import family_tables
from trainfold.core.transform.families.hub_rules import dequantise_of, hub_rules, hub_rules_of
from trainfold.core.transform.families.tied_heads import by_convention
from trainfold.core.transform.name_template import template
from trainfold.core.transform.naming import rename
from trainfold.core.transform.transform import compose

HEAD = {"gpt2": ("lm_head.weight", "transformer.wte.weight")}


def specs_of(shapes, dtype="float32"):
    return {name: LeafSpec(dtype, shape) for name, shape in shapes.items()}


def bits(tensors):
    return {name: (each.dtype, tuple(each.shape), bytes(tensor_bytes(each))) for name, each in tensors.items()}


def weights_of(family, sizes, seed):
    rng = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=rng) for name, shape in native(family, sizes).items()}
    head, embeddings = HEAD.get(family, ("output.weight", "tok_embeddings.weight"))
    if sizes.tied and head in found:
        found[head] = found[embeddings]
    return found


def test_the_families_that_are_tested_are_all():
    assert set(FAMILIES) == set(family_tables.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
def test_what_comes_is_what_the_hub_has_and_all_of_it_comes_back(family, data):
    """T64, K01, K02: names and shapes on specs and on data, and the identity bit by bit, over layers, heads, experts and widths."""
    sizes = data.draw(sizes_of(family))
    tensors, rules = weights_of(family, sizes, data.draw(st.integers(0, 99))), hub_rules(family, **sizes.numbers)
    hub = dict(transform_tensors(rules, tensors))
    assert {name: tuple(each.shape) for name, each in hub.items()} == at_hub(family, sizes)
    assert transform_specs(rules, specs_of(native(family, sizes))) == specs_of(at_hub(family, sizes))
    assert bits(dict(transform_tensors(rules.inverse, hub))) == bits(tensors)


def test_each_row_of_a_table_is_of_use_to_a_model():
    """A misprint would be a rule that finds nothing: each template of names finds one in a model of some family, such as the biases of Qwen2."""
    names = [name for family in FAMILIES for name in (*native(family, Sizes()), *at_hub(family, Sizes()))]
    for family in family_tables.FAMILIES.values():
        for row in family.rows:
            for text in row[1] if isinstance(row[1], tuple) else (row[1],):
                assert any(template(text).match(name) is not None for name in names), text


MADE_OF = {
    "embed_tokens": "tok_embeddings", "lm_head": "output", "norm": "norm", "gate": "gate",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "q_norm": "q_norm", "k_norm": "k_norm",
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "w1": "w1", "w2": "w2", "w3": "w3",
}  # fmt: skip


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "gpt2" and each not in WITH_TIES])
def test_each_tensor_of_the_hub_is_made_of_the_one_of_its_layer_and_expert(family):
    """K01: also where others have its shape, as gates and ups, and the norms."""
    specs = specs_of(native(family, Sizes()))
    rules = hub_rules(family, **Sizes().numbers)
    for plan in plan_parts(rules, specs, dict.fromkeys(at_hub(family, Sizes()))):
        ((source, (box,)),) = plan.reads.items()
        *place, part, kind = plan.name.split(".")
        numbers, (whole, *_) = [int(each) for each in place if each.isdigit()], specs[source].shape
        name = source.split(".")
        assert MADE_OF[part] == (name[-1] if "experts" in name else name[-2])
        assert "experts" in name or name[-1] == kind
        assert [int(each) for each in name if each.isdigit()] == numbers[:1]
        assert box[0] == ((numbers[1], numbers[1] + 1) if "experts" in name else (0, whole))


def test_a_gemma_has_queries_keys_and_values_in_this_order():
    sizes, at = Sizes(tied=True), "model.layers.1.self_attn"
    names = [f"{at}.{each}.weight" for each in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
    plans = plan_parts(hub_rules("gemma3_text", **sizes.numbers), specs_of(native("gemma3_text", sizes)), dict.fromkeys(names))  # fmt: skip
    assert [(source, box[0]) for plan in plans for source, (box,) in plan.reads.items()] == [
        (f"{at}.qkv_proj.weight", (0, 24)),
        (f"{at}.qkv_proj.weight", (24, 36)),
        (f"{at}.qkv_proj.weight", (36, 48)),
        (f"{at}.query_norm.weight", (0, 6)),
        (f"{at}.key_norm.weight", (0, 6)),
    ]


def rotated_in_pairs(x, angles):
    """Meta's: the elements 2j and 2j + 1 are one number of the complex plane."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def rotated_in_halves(x, angles):
    """The hub's: the elements j and j + half are one."""
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_queries_and_keys_have_the_same_products_after_either_rotation(family):
    """K01: that is why their rows change places; and they differ where the rows stay."""
    sizes = Sizes(layers=1)
    tensors = {name: each.double() for name, each in weights_of(family, sizes, 3).items()}
    hub = dict(transform_tensors(hub_rules(family, **sizes.numbers), tensors))
    x = torch.randn(5, sizes.width, dtype=torch.float64)
    angles = torch.outer(torch.arange(5.0), 10000.0 ** -(torch.arange(3.0) / 3)).double()

    def products(query, key, rotated):
        q, k = ((x @ each.T).unflatten(1, (-1, sizes.head_dim)).transpose(0, 1) for each in (query, key))
        return rotated(q, angles) @ rotated(k, angles).repeat_interleave(2, dim=0).mT

    mine = tensors["layers.0.attention.wq.weight"], tensors["layers.0.attention.wk.weight"]
    theirs = hub["model.layers.0.self_attn.q_proj.weight"], hub["model.layers.0.self_attn.k_proj.weight"]
    wanted = products(*mine, rotated_in_pairs)
    torch.testing.assert_close(products(*theirs, rotated_in_halves), wanted)
    assert (products(*mine, rotated_in_halves) - wanted).abs().max() > 0.1


CONFIG = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_of_the_hub_gives_the_numbers(family):
    """K01: `model_type` is the family."""
    rules = hub_rules(family, **Sizes(tied=True).numbers)
    assert hub_rules_of({"model_type": family, **CONFIG}) == rules
    assert family_tables.FAMILIES[family].is_tied == (family in WITH_TIES or family == "gpt2")


def test_what_a_configuration_leaves_out_is_as_in_the_code_of_the_hub():
    """The first configurations of Llama have no heads of keys, those of GPT-2 mention no tie; later ones have nulls."""
    config = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4}
    rules = hub_rules("llama", heads=4, kv_heads=4, head_dim=6, tied=False)
    assert hub_rules_of(config) == rules
    assert hub_rules_of({**config, "head_dim": None, "num_key_value_heads": None}) == rules
    assert hub_rules_of({"model_type": "gpt2", "n_head": 4}) == hub_rules("gpt2", tied=True)
    assert hub_rules("qwen3", tied=False) == hub_rules("qwen3", heads=3, tied=False)


def test_files_without_a_prefix_are_read_by_a_rename_before():
    """The first files of GPT-2 are those of the model without its head."""
    sizes = Sizes(tied=True)
    hub = {name.removeprefix("transformer."): shape for name, shape in at_hub("gpt2", sizes).items()}
    rules = compose(rename("{path*}", "transformer.{path*}"), hub_rules("gpt2", tied=True).inverse)
    assert transform_specs(rules, specs_of(hub)) == specs_of(native("gpt2", sizes))


def test_a_checkpoint_that_has_tied_weights_once_is_not_tied_again():
    """B19: `tied=False` leaves nothing out, and the hub has what it has of a tied model."""
    sizes = Sizes(tied=True)
    once = {name: shape for name, shape in native("llama", sizes).items() if name != "output.weight"}
    rules = hub_rules("llama", **{**sizes.numbers, "tied": False})
    assert transform_specs(rules, specs_of(once)) == specs_of(at_hub("llama", sizes))


REFUSED = {
    "an unknown family": (lambda: hub_rules("bert"), "one of llama, mistral, qwen2"),
    "a configuration of an unknown family": (lambda: hub_rules_of({"model_type": "gemma3", **CONFIG}), "the configuration of its text"),
    "no configuration of a model": (lambda: hub_rules_of({}), "config.model_type: expected one of llama"),
    "missing numbers": (lambda: hub_rules("llama", heads=4, tied=False), "expected heads, kv_heads, head_dim, tied of this llama, found no kv_heads, head_dim"),
    "no word on the tie": (lambda: hub_rules("gpt2"), "found no tied"),
    "a head of an odd size": (lambda: hub_rules("llama", heads=4, kv_heads=2, head_dim=5, tied=True), "expected an even size"),
    "no heads": (lambda: hub_rules("gemma", heads=0, kv_heads=1, head_dim=2), "hub_rules.heads"),
    "a configuration without heads": (lambda: hub_rules_of({"model_type": "gemma"}), "config.num_attention_heads: expected the number of the model, found nothing"),
    "a configuration without a width": (lambda: hub_rules_of({"model_type": "llama", "num_attention_heads": 4}), "config.hidden_size"),
    "heads that are a text": (lambda: hub_rules_of({"model_type": "llama", **CONFIG, "num_attention_heads": "4"}), "found '4'"),
    "a tie that is a number": (lambda: hub_rules_of({"model_type": "gpt2", "tie_word_embeddings": 1}), "config.tie_word_embeddings"),
    "a gemma with a head": (lambda: hub_rules("gemma", heads=4, kv_heads=2, head_dim=6, tied=False), "has no head beside its embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_when_the_rules_are_made(case):
    """K09: and the error names the families that there are."""
    make, text = REFUSED[case]
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        make()


WRONG = [{"heads": 2}, {"heads": 8}, {"kv_heads": 1}, {"kv_heads": 4}, {"head_dim": 12}, {"heads": 6, "kv_heads": 1}]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_numbers_of_another_model_are_refused_in_both_directions(family, wrong):
    """K01, K09: rows that are as many and belong to other heads would be weights of no model."""
    sizes = Sizes(tied=family in WITH_TIES)
    rules = hub_rules(family, **{**sizes.numbers, **wrong})
    with pytest.raises(InvalidState):
        transform_specs(rules, specs_of(native(family, sizes)))
    with pytest.raises(InvalidState):
        transform_specs(rules.inverse, specs_of(at_hub(family, sizes)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "mixtral"])
def test_weights_that_have_the_names_of_the_hub_already_are_refused(family):
    """K09: rules that are applied twice, or in the wrong direction."""
    sizes = Sizes(tied=family in WITH_TIES)
    rules = hub_rules(family, **sizes.numbers)
    with pytest.raises(InvalidState):
        transform_specs(rules, specs_of(at_hub(family, sizes)))
    with pytest.raises(InvalidState):
        transform_specs(rules.inverse, specs_of(native(family, sizes)))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_fused_projection_is_never_taken_apart_at_another_row(heads, kv_heads, half, others, other_kv, other_half):
    """K01, K09: whatever numbers are passed for a gemma, the parts are the right ones, or there are none."""
    sizes = Sizes(heads=heads, kv_heads=kv_heads, head_dim=2 * half, tied=True)
    rules = hub_rules("gemma", heads=others, kv_heads=other_kv, head_dim=2 * other_half)
    try:
        found = transform_specs(rules, specs_of(native("gemma", sizes)))
    except InvalidState:
        return
    assert found == specs_of(at_hub("gemma", sizes))


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_biases_change_places_with_the_rows_of_their_weights(family):
    sizes = Sizes()
    tensors = weights_of(family, sizes, 0)
    for part in ("wq", "wk", "wv"):
        tensors[f"layers.0.attention.{part}.bias"] = tensors[f"layers.0.attention.{part}.weight"][:, 0].clone()
    hub = dict(transform_tensors(hub_rules(family, **sizes.numbers), tensors))
    for part in "qkv":
        at = f"model.layers.0.self_attn.{part}_proj"
        assert torch.equal(hub[f"{at}.bias"], hub[f"{at}.weight"][:, 0])


def test_a_mixture_may_have_layers_without_experts():
    sizes = Sizes(layers=1)
    plain = {name: shape for name, shape in native("qwen3", sizes).items() if "feed_forward" in name}
    plans = plan_parts(hub_rules("qwen3_moe", tied=False), specs_of(plain), dict.fromkeys(name for name in at_hub("qwen3", sizes) if ".mlp." in name))  # fmt: skip
    found = {plan.name.split(".")[-2]: next(iter(plan.reads)).split(".")[-2] for plan in plans}
    assert found == {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def test_a_quantised_configuration_gives_its_rule_and_what_is_not_known_is_refused():
    """K06, K09: to the dtype that it declares, with a block that does not divide the tensor."""
    said = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    rule = dequantise_of({"torch_dtype": "float32", "quantization_config": said})
    weight = torch.arange(15.0).view(3, 5)
    tensors = {
        "a.weight": weight.to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.arange(6.0).view(2, 3),
        "b": weight,
    }
    found = dict(transform_tensors(rule, tensors))
    scale = tensors["a.weight_scale_inv"].repeat_interleave(2, 0)[:3].repeat_interleave(2, 1)[:, :5]
    assert bits(found) == bits({"a.weight": weight * scale, "b": weight})
    assert dequantise_of({"model_type": "llama"}) == compose()
    for wrong in (
        {"quant_method": "gptq"},
        {"quant_method": "fp8"},
        "fp8",
        {"quant_method": "fp8", "weight_block_size": "128"},
    ):
        with pytest.raises(InvalidArgument, match="quantization_config"):
            dequantise_of({"quantization_config": wrong})


@pytest.mark.parametrize("is_tied", [True, None])
def test_of_tied_weights_the_embeddings_stay_wherever_they_are(is_tied):
    """L08: with a head before its embeddings, both were left out of a model that ties them."""
    each = SourceTensor("w", "float32", (2,))
    table = {"lm_head.weight": each, "model.embed_tokens.weight": each}
    found, left_out = by_convention(table, {"x": "w"}, is_tied=is_tied)
    assert list(found) == ["model.embed_tokens.weight"]
    assert left_out == {"lm_head.weight": "tied to model.embed_tokens.weight"}

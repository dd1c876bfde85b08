"""The tables beside models of `transformers`: the names and shapes of their files, nothing missing or left over, and the logits of reference code."""

import json
import logging
import math

import pytest
import torch
from kit.core.hub_family_cases import FAMILIES, WITH_TIES, Sizes, at_hub, native
from torch.nn import functional as F

from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.core.transform.apply import transform_tensors
from trainfold.core.transform.families.hub_rules import hub_rules_of
from trainfold.core.transform.naming import rename
from trainfold.core.transform.transform import compose
from trainfold.core.transform.values import Rearrange, transpose
from trainfold.weights import CheckpointWeights, write_hub_directory

hf = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow(20),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SHARED = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PLAIN = {"query_pre_attn_scalar": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 32


def config_of(family, tied):
    """A small configuration. All experts work for each token, so that the reference needs no choice among them."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    more = {**SHARED, "head_dim": 6, "rope_parameters": ROPE, "tie_word_embeddings": tied}
    match family:
        case "gpt2":
            return hf.GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2,
                                 tie_word_embeddings=tied, attn_implementation="eager")  # fmt: skip
        case "qwen2":
            return hf.Qwen2Config(**{name: value for name, value in more.items() if name != "head_dim"})
        case "mixtral":
            return hf.MixtralConfig(**more, num_local_experts=3, num_experts_per_tok=3)
        case "qwen3_moe":
            return hf.Qwen3MoeConfig(**more, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=20)
        case "gemma2":
            return hf.Gemma2Config(**more, **PLAIN)
        case "gemma3_text":
            ropes = {"full_attention": ROPE, "sliding_attention": ROPE}
            return hf.Gemma3TextConfig(**{**more, "rope_parameters": ropes}, **PLAIN)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3", "gemma": "Gemma"}
    return getattr(hf, f"{names[family]}Config")(**more)


def sizes_of(family, tied):
    return Sizes(tied=tied or family in WITH_TIES)


def weights_of(family, sizes):
    rng = torch.Generator().manual_seed(1)
    found = {name: 0.3 * torch.randn(shape, generator=rng) for name, shape in native(family, sizes).items()}
    for head, embeddings in (("output.weight", "tok_embeddings.weight"), ("lm_head.weight", "transformer.wte.weight")):
        if sizes.tied and head in found:
            found[head] = found[embeddings]
    return found


# Reference code: functions of the tensors under their own names, in plain torch.


def rms(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def angles(length, head_dim):
    return torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))


def in_pairs(x):
    turn = angles(*x.shape[-2:])
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(turn), turn)
    return torch.view_as_real(turned).flatten(-2)


def in_halves(x):
    turn = angles(*x.shape[-2:])
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * turn.cos() - other * turn.sin(), other * turn.cos() + one * turn.sin()], dim=-1)


def attended(q, k, v):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def heads_of(x, head_dim):
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def experts(w, at, x):
    share = linear(w, f"{at}.router.gate", x).softmax(-1)
    w1, w2, w3 = (w[f"{at}.experts.{each}"] for each in ("w1", "w2", "w3"))
    return sum(
        share[..., e, None] * F.linear(F.silu(F.linear(x, w1[e])) * F.linear(x, w3[e]), w2[e]) for e in range(len(w1))
    )


def decoder(family, w, sizes):
    """Llama and those that follow it."""
    rotated = in_halves if family.startswith("qwen") else in_pairs
    x = w["tok_embeddings.weight"][TOKENS]
    for i in range(sizes.layers):
        at = f"layers.{i}.attention"
        h = rms(x, w[f"layers.{i}.attention_norm.weight"])
        q, k, v = (heads_of(linear(w, f"{at}.{each}", h), sizes.head_dim) for each in ("wq", "wk", "wv"))
        if f"{at}.q_norm.weight" in w:
            q, k = rms(q, w[f"{at}.q_norm.weight"]), rms(k, w[f"{at}.k_norm.weight"])
        x = x + linear(w, f"{at}.wo", attended(rotated(q), rotated(k), v))
        h = rms(x, w[f"layers.{i}.ffn_norm.weight"])
        if f"layers.{i}.moe.experts.w1" in w:
            x = x + experts(w, f"layers.{i}.moe", h)
        else:
            gate, down, up = (f"layers.{i}.feed_forward.{each}" for each in ("w1", "w2", "w3"))
            x = x + linear(w, down, F.silu(linear(w, gate, h)) * linear(w, up, h))
    return linear(w, "output", rms(x, w["norm.weight"]))


def gpt2(w, sizes):
    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["transformer.wte.weight"][TOKENS] + w["transformer.wpe.weight"][: TOKENS.shape[1]]
    for i in range(sizes.layers):
        at = f"transformer.h.{i}"
        parts = linear(w, f"{at}.attn.c_attn", norm(f"{at}.ln_1", x)).chunk(3, dim=-1)
        x = x + linear(
            w, f"{at}.attn.c_proj", attended(*(heads_of(each, sizes.width // sizes.heads) for each in parts))
        )
        h = F.gelu(linear(w, f"{at}.mlp.c_fc", norm(f"{at}.ln_2", x)), approximate="tanh")
        x = x + linear(w, f"{at}.mlp.c_proj", h)
    return linear(w, "lm_head", norm("transformer.ln_f", x))


def gemma(family, w, sizes):
    def norm(name, x):
        return rms(x, 1 + w[f"{name}.weight"])

    x = w["embedder.weight"][TOKENS] * math.sqrt(sizes.width)
    rows = [heads * sizes.head_dim for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    for i in range(sizes.layers):
        at = f"model.layers.{i}"
        parts = linear(w, f"{at}.self_attn.qkv_proj", norm(f"{at}.input_layernorm", x)).split(rows, dim=-1)
        q, k, v = (heads_of(each, sizes.head_dim) for each in parts)
        if family == "gemma3_text":
            q, k = norm(f"{at}.self_attn.query_norm", q), norm(f"{at}.self_attn.key_norm", k)
        h = linear(w, f"{at}.self_attn.o_proj", attended(in_halves(q), in_halves(k), v))
        has_more = family != "gemma"
        x = x + (norm(f"{at}.post_attention_layernorm", h) if has_more else h)
        h = norm(f"{at}.pre_feedforward_layernorm" if has_more else f"{at}.post_attention_layernorm", x)
        gate = F.gelu(linear(w, f"{at}.mlp.gate_proj", h), approximate="tanh")
        h = linear(w, f"{at}.mlp.down_proj", gate * linear(w, f"{at}.mlp.up_proj", h))
        x = x + (norm(f"{at}.post_feedforward_layernorm", h) if has_more else h)
    return F.linear(norm("model.norm", x), w["embedder.weight"])


def reference(family, w, sizes):
    if family == "gpt2":
        return gpt2(w, sizes)
    return gemma(family, w, sizes) if family.startswith("gemma") else decoder(family, w, sizes)


def published(path, config, rules, weights):
    """The hub directory that a checkpoint of these weights is exported as; its model, loaded by transformers, which finds all that it needs and no more."""
    firsts = {}
    ties = [(name, firsts[id(each)]) for name, each in weights.items() if firsts.setdefault(id(each), name) != name]
    params = Leaves({name: each for name, each in weights.items() if name not in dict(ties)})
    store = MemoryStore()
    save(TrainState(model=ModelState(params, Leaves(), ties=tuple(ties)), trainer=Progress(step=1)), store)
    config.save_pretrained(path)
    text = json.loads((path / "config.json").read_text())
    write_hub_directory(CheckpointWeights(store), path / "hub", rules=rules, config=text, shard_bytes="8KB")
    model, info = hf.AutoModelForCausalLM.from_pretrained(
        path / "hub", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def rules_of(path, config):
    config.save_pretrained(path)
    return hub_rules_of(json.loads((path / "config.json").read_text()))


CASES = [(family, tied) for family in FAMILIES for tied in (False, True) if tied or family not in WITH_TIES]


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_what_transformers_writes_has_the_names_and_shapes_of_the_table_and_comes_back_the_same(family, tied, tmp_path):
    """T63, T64: HF -> trainfold -> HF has equal bytes, and in between there are the names of the reference code."""
    sizes, config = sizes_of(family, tied), config_of(family, tied)
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rules = hub_rules_of(json.loads((tmp_path / "config.json").read_text()))
    theirs = safetensors.load_file(tmp_path / "model.safetensors")
    assert {name: tuple(each.shape) for name, each in theirs.items()} == at_hub(family, sizes)
    mine = dict(transform_tensors(rules.inverse, theirs))
    assert {name: tuple(each.shape) for name, each in mine.items()} == native(family, sizes)
    again = dict(transform_tensors(rules, mine))
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], each) for name, each in theirs.items())


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_from_pretrained_computes_the_logits_of_the_reference_code(family, tied, tmp_path):
    """T63: trainfold -> HF -> `from_pretrained` -> equal logits."""
    sizes, config = sizes_of(family, tied), config_of(family, tied)
    weights = weights_of(family, sizes)
    model = published(tmp_path, config, rules_of(tmp_path, config), weights)
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=TOKENS).logits, reference(family, weights, sizes), rtol=1e-3, atol=1e-4
        )


SPOILED = {
    "llama": lambda rules: compose(*(each for each in rules.parts if not isinstance(each, Rearrange))),
    "gpt2": lambda rules: compose(rules, transpose("transformer.h.{i}.attn.c_proj.weight")),
    "mixtral": lambda rules: compose(
        rename("layers.{i}.moe.experts.w1", "{i}.x"),
        rename("layers.{i}.moe.experts.w3", "layers.{i}.moe.experts.w1"),
        rename("{i}.x", "layers.{i}.moe.experts.w3"),
        rules,
    ),
}


@pytest.mark.parametrize("family", SPOILED)
def test_logits_differ_where_rows_stay_or_gates_are_exchanged(family, tmp_path):
    """The test above has teeth: these have the right names and shapes, and load."""
    sizes, config = sizes_of(family, tied=False), config_of(family, tied=False)
    weights = weights_of(family, sizes)
    model = published(tmp_path, config, SPOILED[family](rules_of(tmp_path, config)), weights)
    with torch.no_grad():
        assert (model(input_ids=TOKENS).logits - reference(family, weights, sizes)).abs().max() > 0.1


MOE = {
    "mixtral": lambda: hf.MixtralConfig(**SHARED, num_local_experts=3, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SHARED, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=8),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SHARED, head_dim=6, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20),
    "olmoe": lambda: hf.OlmoeConfig(**SHARED, num_experts=3, num_experts_per_tok=2),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**{**SHARED, "num_key_value_heads": 4}, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1, kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**SHARED, head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1),
}  # fmt: skip


@pytest.mark.parametrize("family", MOE)
def test_modules_of_transformers_with_experts_in_one_tensor_become_their_files_and_come_back(family, tmp_path):
    """K02, K08: the files that `save_pretrained` writes, byte for byte in each tensor; and `from_pretrained` makes the same of both."""
    torch.manual_seed(3)
    config = MOE[family]()
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    assert any(name.endswith("experts.gate_up_proj") for name in model.state_dict()), "of version 5"
    model.save_pretrained(tmp_path / "theirs")
    rules = hub_rules_of(config.to_dict(), code="transformers")
    state = TrainState(model=ModelState(Leaves({name: each.detach() for name, each in model.state_dict().items()}), Leaves()), trainer=Progress())  # fmt: skip
    write_hub_directory(state, tmp_path / "ours", rules=rules, config=json.loads((tmp_path / "theirs/config.json").read_text()))  # fmt: skip
    theirs, ours = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(each, ours[name]) for name, each in theirs.items())
    with torch.no_grad():
        one, other = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("ours", "theirs"))
        assert torch.equal(one(TOKENS).logits, other(TOKENS).logits)
        torch.testing.assert_close(one(TOKENS).logits, model(TOKENS).logits)
    back = dict(transform_tensors(rules.inverse, theirs))
    assert all(torch.equal(back[name], each) for name, each in model.state_dict().items())

"""Small models of the families: the names and shapes that the reference code gives them, and those that the hub has. Written out by hand: two lists that know nothing of the tables."""

import attrs
import hypothesis.strategies as st

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")
WITH_TIES = ("gemma", "gemma2", "gemma3_text")  # always


@attrs.frozen
class Sizes:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    width: int = 24
    hidden: int = 20
    experts: int = 3
    vocab: int = 32
    tied: bool = False

    @property
    def numbers(self):
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "tied": self.tied}


@st.composite
def sizes_of(draw, family):
    kv_heads = draw(st.integers(1, 3))
    return Sizes(
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        width=draw(st.integers(1, 5)),
        hidden=draw(st.integers(1, 5)),
        experts=draw(st.integers(1, 12)),
        vocab=draw(st.integers(1, 7)),
        tied=family in WITH_TIES or draw(st.booleans()),
    )


def native(family, n):
    """Name -> shape in reference code, both names of tied weights, as `state_dict` has them."""
    if family == "gpt2":
        return nanogpt(n)
    if family.startswith("gemma"):
        return gemma_pytorch(family, n)
    q, kv, found = n.heads * n.head_dim, n.kv_heads * n.head_dim, {"tok_embeddings.weight": (n.vocab, n.width)}
    for i in range(n.layers):
        at = f"layers.{i}"
        found |= {
            f"{at}.attention.wq.weight": (q, n.width),
            f"{at}.attention.wk.weight": (kv, n.width),
            f"{at}.attention.wv.weight": (kv, n.width),
            f"{at}.attention.wo.weight": (n.width, q),
            f"{at}.attention_norm.weight": (n.width,),
            f"{at}.ffn_norm.weight": (n.width,),
        }
        if family == "qwen2":
            found |= {f"{at}.attention.{each}.bias": (size,) for each, size in (("wq", q), ("wk", kv), ("wv", kv))}
        if family.startswith("qwen3"):
            found |= {f"{at}.attention.{each}_norm.weight": (n.head_dim,) for each in "qk"}
        experts = {"w1": (n.hidden, n.width), "w2": (n.width, n.hidden), "w3": (n.hidden, n.width)}
        if family in {"mixtral", "qwen3_moe"}:
            found |= {f"{at}.moe.experts.{each}": (n.experts, *shape) for each, shape in experts.items()}
            found[f"{at}.moe.router.gate.weight"] = (n.experts, n.width)
        else:
            found |= {f"{at}.feed_forward.{each}.weight": shape for each, shape in experts.items()}
    return found | {"norm.weight": (n.width,), "output.weight": (n.vocab, n.width)}


def nanogpt(n):
    found = {"transformer.wte.weight": (n.vocab, n.width), "transformer.wpe.weight": (16, n.width)}
    for i in range(n.layers):
        at = f"transformer.h.{i}"
        found |= {f"{at}.{norm}.{kind}": (n.width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, (rows, columns) in gpt2_layers(n).items():
            found |= {f"{at}.{name}.weight": (rows, columns), f"{at}.{name}.bias": (rows,)}
    found |= {f"transformer.ln_f.{kind}": (n.width,) for kind in ("weight", "bias")}
    return found | {"lm_head.weight": (n.vocab, n.width)}


def gpt2_layers(n):
    w = n.width
    return {
        "attn.c_attn": (3 * w, w),
        "attn.c_proj": (w, w),
        "mlp.c_fc": (4 * w, w),
        "mlp.c_proj": (w, 4 * w),
    }


def gemma_pytorch(family, n):
    q, kv, found = n.heads * n.head_dim, n.kv_heads * n.head_dim, {"embedder.weight": (n.vocab, n.width)}
    for i in range(n.layers):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.self_attn.qkv_proj.weight": (q + 2 * kv, n.width),
            f"{at}.self_attn.o_proj.weight": (n.width, q),
            f"{at}.mlp.gate_proj.weight": (n.hidden, n.width),
            f"{at}.mlp.up_proj.weight": (n.hidden, n.width),
            f"{at}.mlp.down_proj.weight": (n.width, n.hidden),
            f"{at}.input_layernorm.weight": (n.width,),
            f"{at}.post_attention_layernorm.weight": (n.width,),
        }
        if family != "gemma":
            found |= {f"{at}.{each}_feedforward_layernorm.weight": (n.width,) for each in ("pre", "post")}
        if family == "gemma3_text":
            found |= {f"{at}.self_attn.{each}_norm.weight": (n.head_dim,) for each in ("query", "key")}
    return found | {"model.norm.weight": (n.width,)}


def at_hub(family, n):
    """Name -> shape in the files that the hub has of this model: tied weights once."""
    if family == "gpt2":
        found = nanogpt(n)
        for i in range(n.layers):
            for name, (rows, columns) in gpt2_layers(n).items():
                found[f"transformer.h.{i}.{name}.weight"] = (columns, rows)
        return {name: shape for name, shape in found.items() if name != "lm_head.weight" or not n.tied}
    q, kv, found = n.heads * n.head_dim, n.kv_heads * n.head_dim, {"model.embed_tokens.weight": (n.vocab, n.width)}
    for i in range(n.layers):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (q, n.width),
            f"{at}.self_attn.k_proj.weight": (kv, n.width),
            f"{at}.self_attn.v_proj.weight": (kv, n.width),
            f"{at}.self_attn.o_proj.weight": (n.width, q),
            f"{at}.input_layernorm.weight": (n.width,),
            f"{at}.post_attention_layernorm.weight": (n.width,),
        }
        if family == "qwen2":
            found |= {f"{at}.self_attn.{each}_proj.bias": (size,) for each, size in (("q", q), ("k", kv), ("v", kv))}
        if family in {"qwen3", "qwen3_moe", "gemma3_text"}:
            found |= {f"{at}.self_attn.{each}_norm.weight": (n.head_dim,) for each in "qk"}
        if family in {"gemma2", "gemma3_text"}:
            found |= {f"{at}.{each}_feedforward_layernorm.weight": (n.width,) for each in ("pre", "post")}
        up, down = (n.hidden, n.width), (n.width, n.hidden)
        if family == "mixtral":
            found[f"{at}.block_sparse_moe.gate.weight"] = (n.experts, n.width)
            for e in range(n.experts):
                each = f"{at}.block_sparse_moe.experts.{e}"
                found |= {f"{each}.w1.weight": up, f"{each}.w2.weight": down, f"{each}.w3.weight": up}
            continue
        places = [f"{at}.mlp.experts.{e}" for e in range(n.experts)] if family == "qwen3_moe" else [f"{at}.mlp"]
        for each in places:
            found |= {
                f"{each}.gate_proj.weight": up,
                f"{each}.up_proj.weight": up,
                f"{each}.down_proj.weight": down,
            }
        if family == "qwen3_moe":
            found[f"{at}.mlp.gate.weight"] = (n.experts, n.width)
    found["model.norm.weight"] = (n.width,)
    return found if n.tied else found | {"lm_head.weight": (n.vocab, n.width)}

"""`FAMILIES`: what differs between the weights of a family in its reference code and at the hub, as rows of data."""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, final

import attrs

RenameRow: TypeAlias = tuple[Literal["rename"], str, str]
RearrangeRow: TypeAlias = tuple[Literal["rearrange"], tuple[str, ...], str, Mapping[str, str | int]]
SplitRow: TypeAlias = tuple[Literal["split"], str, tuple[str, ...], tuple[str, ...]]
UnstackRow: TypeAlias = tuple[Literal["unstack"], str, str, str]
TieRow: TypeAlias = tuple[Literal["tie"], str, str]
Row: TypeAlias = RenameRow | RearrangeRow | SplitRow | UnstackRow | TieRow
"""A function of `trainfold.transforms`, and its arguments. No shares are equal ones. A size or a share is a number, or the name of one: ``heads``, ``kv_heads``, ``head_dim``, ``half_head``."""


@final
@attrs.frozen
class Family:
    """How the reference code's tensors become the hub's.

    Attributes:
        rows: in order. Those that find nothing do nothing, so that a table serves models with biases and without.
        is_tied: whether the head is tied to the embeddings where a configuration does not mention it.
    """

    rows: tuple[Row, ...]
    is_tied: bool


_PAIRS: Final[Mapping[str, str | int]] = {"h": "heads", "d": "half_head", "two": 2}
_KV_PAIRS: Final[Mapping[str, str | int]] = {**_PAIRS, "h": "kv_heads"}

# Meta's code and torchtitan turn the elements 2j and 2j + 1 of a head together; the hub's code turns j and j + half of the head.
_IN_HALVES: Final[tuple[Row, ...]] = (
    ("rearrange", ("layers.{i}.attention.wq.weight",), "(h d two) i -> (h two d) i", _PAIRS),
    ("rearrange", ("layers.{i}.attention.wk.weight",), "(h d two) i -> (h two d) i", _KV_PAIRS),
    ("rearrange", ("layers.{i}.attention.wq.bias",), "(h d two) -> (h two d)", _PAIRS),
    ("rearrange", ("layers.{i}.attention.wk.bias",), "(h d two) -> (h two d)", _KV_PAIRS),
)
_DECODER: Final[tuple[Row, ...]] = (
    ("tie", "output.weight", "tok_embeddings.weight"),
    ("rename", "tok_embeddings.weight", "model.embed_tokens.weight"),
    ("rename", "layers.{i}.attention.wq.{kind}", "model.layers.{i}.self_attn.q_proj.{kind}"),
    ("rename", "layers.{i}.attention.wk.{kind}", "model.layers.{i}.self_attn.k_proj.{kind}"),
    ("rename", "layers.{i}.attention.wv.{kind}", "model.layers.{i}.self_attn.v_proj.{kind}"),
    ("rename", "layers.{i}.attention.wo.{kind}", "model.layers.{i}.self_attn.o_proj.{kind}"),
    ("rename", "layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("rename", "layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    ("rename", "norm.weight", "model.norm.weight"),
    ("rename", "output.weight", "lm_head.weight"),
)
_FEED_FORWARD: Final[tuple[Row, ...]] = (
    ("rename", "layers.{i}.feed_forward.w1.{kind}", "model.layers.{i}.mlp.gate_proj.{kind}"),
    ("rename", "layers.{i}.feed_forward.w2.{kind}", "model.layers.{i}.mlp.down_proj.{kind}"),
    ("rename", "layers.{i}.feed_forward.w3.{kind}", "model.layers.{i}.mlp.up_proj.{kind}"),
)
_HEAD_NORMS: Final[tuple[Row, ...]] = (
    ("rename", "layers.{i}.attention.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    ("rename", "layers.{i}.attention.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
)
_MIXTRAL_EXPERTS: Final[tuple[Row, ...]] = (
    ("rename", "layers.{i}.moe.router.gate.weight", "model.layers.{i}.block_sparse_moe.gate.weight"),
    ("unstack", "layers.{i}.moe.experts.w1", "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "e"),
    ("unstack", "layers.{i}.moe.experts.w2", "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "e"),
    ("unstack", "layers.{i}.moe.experts.w3", "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "e"),
)
_QWEN_EXPERTS: Final[tuple[Row, ...]] = (
    ("rename", "layers.{i}.moe.router.gate.weight", "model.layers.{i}.mlp.gate.weight"),
    ("unstack", "layers.{i}.moe.experts.w1", "model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "e"),
    ("unstack", "layers.{i}.moe.experts.w2", "model.layers.{i}.mlp.experts.{e}.down_proj.weight", "e"),
    ("unstack", "layers.{i}.moe.experts.w3", "model.layers.{i}.mlp.experts.{e}.up_proj.weight", "e"),
)
_GPT2: Final[tuple[Row, ...]] = (
    ("tie", "lm_head.weight", "transformer.wte.weight"),
    (
        "rearrange",
        (
            "transformer.h.{i}.attn.c_attn.weight",
            "transformer.h.{i}.attn.c_proj.weight",
            "transformer.h.{i}.mlp.c_fc.weight",
            "transformer.h.{i}.mlp.c_proj.weight",
        ),
        "o i -> i o",
        {},
    ),
)
# Two rows move nothing: queries, keys and values together do not give wrong numbers of heads away, and the output projection and the queries alone do.
_GEMMA: Final[tuple[Row, ...]] = (
    ("rearrange", ("model.layers.{i}.self_attn.o_proj.weight",), "o (h d) -> o (h d)", {"h": "heads", "d": "head_dim"}),
    (
        "split",
        "model.layers.{i}.self_attn.qkv_proj.weight",
        (
            "model.layers.{i}.self_attn.q_proj.weight",
            "model.layers.{i}.self_attn.k_proj.weight",
            "model.layers.{i}.self_attn.v_proj.weight",
        ),
        ("heads", "kv_heads", "kv_heads"),
    ),
    ("rearrange", ("model.layers.{i}.self_attn.q_proj.weight",), "(h d) i -> (h d) i", {"h": "heads", "d": "head_dim"}),
    ("rename", "model.layers.{i}.self_attn.query_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    ("rename", "model.layers.{i}.self_attn.key_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
    ("rename", "embedder.weight", "model.embed_tokens.weight"),
)

# Since version 5, modules of transformers have all experts of a layer in two tensors; files of the hub have them apart.
_FUSED_MIXTRAL: Final[tuple[Row, ...]] = (
    ("rename", "model.layers.{i}.mlp.gate.weight", "model.layers.{i}.block_sparse_moe.gate.weight"),
    (
        "unstack",
        "model.layers.{i}.mlp.experts.gate_up_proj",
        "model.layers.{i}.block_sparse_moe.experts.{e}.gate_up_proj",
        "e",
    ),
    (
        "split",
        "model.layers.{i}.block_sparse_moe.experts.{e}.gate_up_proj",
        (
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
        ),
        (),
    ),
    (
        "unstack",
        "model.layers.{i}.mlp.experts.down_proj",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
        "e",
    ),
)
_FUSED_QWEN: Final[tuple[Row, ...]] = (
    ("unstack", "model.layers.{i}.mlp.experts.gate_up_proj", "model.layers.{i}.mlp.experts.{e}.gate_up_proj", "e"),
    (
        "split",
        "model.layers.{i}.mlp.experts.{e}.gate_up_proj",
        ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
        (),
    ),
    ("unstack", "model.layers.{i}.mlp.experts.down_proj", "model.layers.{i}.mlp.experts.{e}.down_proj.weight", "e"),
)

_LLAMA: Final = Family(_IN_HALVES + _DECODER + _FEED_FORWARD, is_tied=False)
_QWEN: Final = Family(_DECODER + _HEAD_NORMS + _FEED_FORWARD, is_tied=False)

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gpt2": Family(_GPT2, is_tied=True),
    "gemma": Family(_GEMMA, is_tied=True),
    "gemma2": Family(_GEMMA, is_tied=True),
    "gemma3_text": Family(_GEMMA, is_tied=True),
    "mixtral": Family(_IN_HALVES + _DECODER + _MIXTRAL_EXPERTS, is_tied=False),
    "qwen3_moe": Family(_DECODER + _HEAD_NORMS + _FEED_FORWARD + _QWEN_EXPERTS, is_tied=False),
}
"""By the ``model_type`` that a configuration of the hub names."""

IN_TRANSFORMERS: Final[Mapping[str, tuple[Row, ...]]] = {
    **dict.fromkeys(FAMILIES, ()),
    "mixtral": _FUSED_MIXTRAL,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"), _FUSED_QWEN),
}
"""From the names of modules of transformers to those of the hub, by ``model_type``; nothing for families whose names are the same."""

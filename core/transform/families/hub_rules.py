"""`hub_rules`, `hub_rules_of` and `dequantise_of`: the transform from the names of reference code to those of a model hub, for a family and the numbers of a model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeVar

from trainfold.core.checks import choice, count, document
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.json_values import shown
from trainfold.core.transform.families.family_tables import FAMILIES, IN_TRANSFORMERS, Family, Row
from trainfold.core.transform.fusing import split, unstack
from trainfold.core.transform.name_template import matching, template
from trainfold.core.transform.naming import rename, tie
from trainfold.core.transform.transform import Composed, Invertible, InvertibleComposed, compose
from trainfold.core.transform.values import dequantise, float_dtype, rearrange

T = TypeVar("T")
_FIX: Final = "pass what is in the config.json of the model: HubDirectory(path).config()"
_OF_HEAD: Final = {"half_head": "head_dim"}
"""A number in the tables -> the one that it is made of."""


def hub_rules(
    family: str,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool | None = None,
) -> InvertibleComposed:
    """Make the rules that rename and rearrange the weights of a family as the hub has them. Their inverse starts from what the hub has.

    Numbers that a family does not need may be left out: where nothing is rearranged or taken apart, heads do not matter.

    Args:
        family: ``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``mixtral`` and ``qwen3_moe`` as Meta's and torchtitan's code names their weights, ``gpt2`` as
            nanoGPT does, ``gemma``, ``gemma2`` and ``gemma3_text`` as gemma_pytorch does.
        heads: the number of heads of queries.
        kv_heads: the number of heads of keys and values.
        head_dim: the size of a head.
        tied: whether the head of the model is tied to its embeddings; then the hub has it once, and the model under both names.

    Raises:
        InvalidArgument: for an unknown family, and numbers that it needs and are missing.

    Examples:
        >>> print(hub_rules("gpt2", tied=True))
        tie lm_head.weight to transformer.wte.weight
        rearrange transformer.h.{i}.attn.c_attn.weight, transformer.h.{i}.attn.c_proj.weight, transformer.h.{i}.mlp.c_fc.weight, transformer.h.{i}.mlp.c_proj.weight: o i -> i o
    """
    table = _family("hub_rules.family", family, FAMILIES)
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    needed = _needed(table)
    wanted = {name: value for name, value in {**given, "tied": tied}.items() if name in needed}
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        raise InvalidArgument(
            "hub_rules", expected=f"{', '.join(wanted)} of this {family}", found=f"no {', '.join(missing)}",
            fix="pass them, or its config.json to hub_rules_of")  # fmt: skip
    numbers = {
        name: count(f"hub_rules.{name}", value, fix="pass the number of the model's configuration")
        for name, value in given.items()
        if value is not None
    }
    if "half_head" in needed:
        if numbers["head_dim"] % 2:
            raise InvalidArgument("hub_rules.head_dim", expected="an even size, since pairs of a head turn together", found=head_dim,
                                  fix="pass the size of a head, which is not the number of heads")  # fmt: skip
        numbers["half_head"] = numbers["head_dim"] // 2
    if tied is not None:
        choice("hub_rules.tied", tied, (True, False), fix="say whether the head is tied to the embeddings")
    if tied is False and "tied" not in needed:
        raise InvalidArgument("hub_rules.tied", expected=f"True: the reference code of {family} has no head beside its embeddings", found=tied,
                              fix="write rules for a model with a head of its own")  # fmt: skip
    return compose(*(_transform(row, numbers) for row in table.rows if row[0] != "tie" or tied))


def hub_rules_of(
    config: Mapping[str, object], *, code: Literal["reference", "transformers"] = "reference"
) -> InvertibleComposed:
    """Make the rules of a model from the configuration that the hub has beside its weights.

    Args:
        config: what is in ``config.json``. ``model_type`` is the family. As in the hub's own code, heads of keys and values that are not mentioned are as many as those of queries, and the
            size of a head is that of the model over its heads. A number that is wrong for the weights is an error when they are transformed.
        code: whose names the model has. Since version 5, models of ``transformers`` have the experts of a layer in two tensors, and there are rules for mixtral, qwen2_moe, qwen3_moe, olmoe,
            deepseek_v3 and glm4_moe. Other families have the names of the hub in it, and so have all before version 5.

    Raises:
        InvalidArgument: for an unknown family, and numbers that it needs and are missing.

    Examples:
        >>> rules = hub_rules_of({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2})
        >>> rules == hub_rules("llama", heads=4, kv_heads=2, head_dim=16, tied=False)
        True
        >>> print(hub_rules_of({"model_type": "qwen3_moe"}, code="transformers").parts[-1])
        unstack model.layers.{i}.mlp.experts.down_proj = model.layers.{i}.mlp.experts.{e}.down_proj.weight over e
    """
    document("hub_rules_of.config", config, fix=_FIX)
    choice("hub_rules_of.code", code, ("reference", "transformers"), fix="say whose names the model has")
    if code == "transformers":
        rows = _family("config.model_type", config.get("model_type"), IN_TRANSFORMERS)
        return compose(*(_transform(row, {}) for row in rows))
    family = config.get("model_type")
    table = _family("config.model_type", family, FAMILIES)
    needed = _needed(table)
    tied = config.get("tie_word_embeddings", table.is_tied)
    choice("config.tie_word_embeddings", tied, (True, False), fix="pass the config.json of the model")
    numbers: dict[str, int] = {}
    if "heads" in needed:
        heads = _number(config, "num_attention_heads")
        has_kv = config.get("num_key_value_heads") is not None
        has_dim = config.get("head_dim") is not None
        numbers = {
            "heads": heads,
            "kv_heads": _number(config, "num_key_value_heads") if has_kv else heads,
            "head_dim": _number(config, "head_dim") if has_dim else _number(config, "hidden_size") // heads,
        }
    return hub_rules(str(family), **numbers, tied=bool(tied))


def check_experts_apart(config: Mapping[str, object], names: Iterable[str]) -> None:
    """Check that experts are apart where the hub's files of a family have them so.

    Args:
        config: what is in ``config.json``.
        names: of what is written.

    Raises:
        InvalidState: for experts in one tensor, as modules of ``transformers`` have them in memory.
    """
    family = config.get("model_type")
    rows = IN_TRANSFORMERS.get(family, ()) if isinstance(family, str) else ()
    fused = [template(row[1]) for row in rows if row[0] == "unstack"]
    odd = next(iter(matching(fused, names)), None)
    if odd is not None:
        raise InvalidState(
            odd, expected=f"the experts of this {family} apart, as files of the hub have them", found="all of them in one tensor",
            fix='pass rules=hub_rules_of(config, code="transformers"), or --rules transformers')  # fmt: skip


def dequantise_of(config: Mapping[str, object]) -> Composed:
    """Make the rules that a configuration says are needed for weights in float8 with scales of blocks, as DeepSeek publishes them: none if it mentions no quantisation.

    Args:
        config: what is in ``config.json``. ``quantization_config`` has the method and the size of a block, and ``torch_dtype`` or ``dtype`` says what the weights become; bfloat16 if neither does.

    Raises:
        InvalidArgument: for another method, which has rules of its own.

    Examples:
        >>> print(dequantise_of({"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
        dequantise {path*}.weight by {path*}.weight_scale_inv in blocks of [128, 128] to bfloat16 (no inverse)
    """
    document("dequantise_of.config", config, fix=_FIX)
    found = config.get("quantization_config")
    if found is None:
        return compose()
    block = (
        found.get("weight_block_size") if isinstance(found, Mapping) and found.get("quant_method") == "fp8" else None
    )
    if not isinstance(block, Sequence) or isinstance(block, str):
        raise InvalidArgument("config.quantization_config", expected="quant_method fp8 with a weight_block_size", found=shown(found),
                              fix="write the rule with dequantise, or convert the weights with the tool that quantised them")  # fmt: skip
    sizes = [count("config.quantization_config.weight_block_size", each, fix=_FIX) for each in block]
    said = next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    dtype = "bfloat16" if said is None else float_dtype(f"config.{said}", config[said])
    return compose(dequantise("{path*}.weight", "{path*}.weight_scale_inv", block=sizes, dtype=dtype))


def _family(where: str, family: object, families: Mapping[str, T]) -> T:
    found = families.get(family) if isinstance(family, str) else None
    if found is None:
        raise InvalidArgument(where, expected=f"one of {', '.join(families)}", found=shown(family),
                              fix="write the rules of this family with the functions of trainfold.transforms; "
                              "of a model of text and images, pass the configuration of its text")  # fmt: skip
    return found


def _number(config: Mapping[str, object], name: str) -> int:
    if name not in config:
        raise InvalidArgument(f"config.{name}", expected="the number of the model", found="nothing", fix="pass the config.json of the model")  # fmt: skip
    return count(f"config.{name}", config[name], fix="pass the config.json of the model")


def _needed(table: Family) -> dict[str, None]:
    """The arguments and numbers of which the rows make use, in their order."""
    found: dict[str, None] = {}
    for row in table.rows:
        if row[0] == "rearrange":
            names = [size for size in row[3].values() if isinstance(size, str)]
        else:
            names = list(row[3]) if row[0] == "split" else ["tied"] if row[0] == "tie" else []
        for name in names:
            found |= {_OF_HEAD.get(name, name): None, name: None}
    return found


def _transform(row: Row, numbers: Mapping[str, int]) -> Invertible:
    match row:
        case "rename", old, new:
            return rename(old, new)
        case "tie", alias, name:
            return tie(alias, name)
        case "rearrange", names, pattern, sizes:
            return rearrange(names, pattern, **{axis: size if isinstance(size, int) else numbers[size] for axis, size in sizes.items()})  # fmt: skip
        case "split", whole, parts, shares:
            return split(whole, parts, shares=[numbers[each] for each in shares] or None)
        case "unstack", whole, each, over:
            return unstack(whole, each, over=over)

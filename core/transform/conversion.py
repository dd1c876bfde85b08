"""`Conversion`: what a conversion will read and write, as a value that prints; and the transform that its options ask for."""

from collections.abc import Mapping
from typing import Final, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.transform.families.hub_rules import hub_rules, hub_rules_of
from trainfold.core.transform.transform import Transform, compose
from trainfold.core.transform.values import cast

TARGETS: Final = ("native", "hf", "dcp")
"""What can be written."""

DTYPES: Final = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
}  # fmt: skip
"""What ``--dtype`` may say -> torch's name."""

_HUB: Final = (
    "hf",
    "safetensors",
    "torch",
    "accelerate",
)  # where the names of a model are those of a hub, if rules are asked for


@final
@attrs.frozen
class Conversion:
    """What a conversion reads and writes. Prints as a table.

    Attributes:
        source: the path that is read.
        source_format: its format.
        target: the path that is written.
        to: one of `TARGETS`.
        step: the step of the source, if it says one.
        transforms: what is done to the tensors, in words; empty for nothing.
        before: name -> spec of what is read of the model.
        after: the same of what is written.
        components: what is written.
        left_out: what the source has, or a run would need, and is not written.
        files: name -> size in bytes of each file that is written.
    """

    source: str
    source_format: str
    target: str
    to: str
    step: int | None
    transforms: str
    before: Mapping[str, LeafSpec] = attrs.field(repr=False)
    after: Mapping[str, LeafSpec] = attrs.field(repr=False)
    components: tuple[str, ...]
    left_out: tuple[str, ...]
    files: Mapping[str, int]

    @property
    def read_bytes(self) -> int:
        """How much is read of the model."""
        return sum(size_bytes(each.dtype, each.shape) for each in self.before.values())

    @property
    def size_bytes(self) -> int:
        """How much is written, without what is beside the tensors."""
        return sum(self.files.values())

    def __str__(self) -> str:
        lines = [
            f"convert {self.source} ({self.source_format}) to {self.target} ({self.to}){'' if self.step is None else f', step {self.step}'}",
            f"model: {len(self.before)} tensors, {self.read_bytes:,} bytes are read; {len(self.after)} are written",
            *(f"  {line}" for line in self.transforms.splitlines()),
            f"written: {', '.join(self.components)}",
            f"left out: {', '.join(self.left_out) or 'nothing'}",
            *(f"{name:48} {size:>18,} bytes" for name, size in self.files.items()),
        ]
        return "\n".join(lines)


def transform_for(
    source_format: str, to: str, *, rules: str | None, dtype: str | None, config: Mapping[str, object] | None
) -> Transform | None:
    """The transform that options ask for.

    Args:
        source_format: of what is read; see `FORMATS` of `core.weights.detected`.
        to: one of `TARGETS`.
        rules: a family of `hub_rules`, or None. They lead from the names of the reference code to those of the hub where the target is ``hf``,
            and back where the source is of a hub.
        dtype: one of `DTYPES`, or None.
        config: the model's ``config.json``, which has the numbers that rules need.

    Returns:
        The transform; None for nothing.

    Raises:
        InvalidArgument: for what cannot be done, before anything is read.

    Examples:
        >>> print(transform_for("run", "hf", rules="gpt2", dtype="bf16", config={"model_type": "gpt2"}))
        tie lm_head.weight to transformer.wte.weight
        rearrange transformer.h.{i}.attn.c_attn.weight, transformer.h.{i}.attn.c_proj.weight, transformer.h.{i}.mlp.c_fc.weight, transformer.h.{i}.mlp.c_proj.weight: o i -> i o
        cast floating tensors to bfloat16 (no inverse)
        >>> transform_for("hf", "native", rules=None, dtype=None, config=None)
    """
    _among("convert.to", to, TARGETS)
    found: list[Transform] = []
    if rules is not None:
        is_hub = source_format in _HUB
        if is_hub == (to == "hf"):
            raise InvalidArgument("convert.rules", expected="one side with the names of a hub, and one with those of the reference code",
                                  found=f"{source_format} to {to}", fix="leave out --rules: both sides have the same names")  # fmt: skip
        whole = hub_rules(rules) if config is None else _of_config(rules, config)
        found.append(whole if to == "hf" else _inverse(whole))
    if dtype is not None:
        found.append(cast(DTYPES[_among("convert.dtype", dtype, DTYPES)]))
    return compose(*found) if found else None


def _of_config(rules: str, config: Mapping[str, object]) -> Transform:
    family = config.get("model_type")
    if family != rules:
        raise InvalidArgument("convert.rules", expected=f"the family of the config, {family}", found=rules, fix="give that family, or the config.json of this model")  # fmt: skip
    return hub_rules_of(config)


def _inverse(transform: Transform) -> Transform:
    found = transform.inverse
    if found is None:
        raise InvalidArgument(
            "convert.rules",
            expected="rules with an inverse",
            found=str(transform),
            fix="write a transform of your own, and use trainfold.weights.Transformed",
        )
    return found


def _among(where: str, value: str, known: "tuple[str, ...] | Mapping[str, str]") -> str:
    if value not in known:
        raise InvalidArgument(where, expected=f"one of {', '.join(known)}", found=repr(value), fix="give one of these")
    return value

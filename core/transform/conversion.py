"""`Conversion`: what a conversion will read and write, as a value that prints; and what its options mean."""

from collections.abc import Iterable, Mapping
from typing import Final, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.json_values import shown
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.transform.converters.converter import Converter
from trainfold.core.transform.converters.lora import lora_of
from trainfold.core.transform.families.adapter_rules import is_of_adapter
from trainfold.core.transform.families.hub_rules import dequantise_of, hub_rules, hub_rules_of
from trainfold.core.transform.transform import Transform, compose

TARGETS: Final = ("native", "hf", "dcp")
"""What can be written."""

_TRANSFORMERS: Final = "transformers"  # as a family: the one that the configuration names, in the names of that library

DTYPES: Final = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
}  # fmt: skip
"""What ``--dtype`` may say -> torch's name."""

_HAS_HUB_NAMES: Final = {"hf": True, "safetensors": True, "run": False, "checkpoint": False}
"""Whether a model has the names of a hub in a format; others have either."""


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
        tensors_left_out: name of a tensor that is not written -> the reason.
        is_there: whether the target has files of these names and sizes already, as a process leaves them that is killed at its end: they are compared, and nothing is written.
        needed_bytes: how much room is needed at the target, beside what a killed process has written there and is used.
        free_bytes: how much of its disk is free; None in a bucket, which has no limit.
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
    tensors_left_out: Mapping[str, str] = attrs.field(factory=dict)
    is_there: bool = False
    needed_bytes: int = 0
    free_bytes: int | None = 0

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
            *(f"left out: {name}, {reason}" for name, reason in self.tensors_left_out.items()),
            *(f"{name:48} {size:>18,} bytes" for name, size in self.files.items()),
            "there already: compared, and not written"
            if self.is_there
            else f"room: {self.needed_bytes:,} bytes are needed, {'without a limit' if self.free_bytes is None else f'{self.free_bytes:,} are free'}",
        ]
        return "\n".join(lines)


def rules_for(source_format: str, to: str, family: str | None, config: Mapping[str, object] | None) -> Transform | None:
    """The rules between the names of a model's code and those of the hub, in the direction that a conversion needs.

    Args:
        source_format: of what is read; see `FORMATS` of `core.weights.detected`.
        to: one of `TARGETS`.
        family: one of `hub_rules`, or ``transformers`` for the modules of that library; None for no rules. They lead to the names of the hub where the target is ``hf``, and from them otherwise.
        config: the model's ``config.json``, which has the numbers that rules need.

    Raises:
        InvalidArgument: for what cannot be done, before anything is read.

    Examples:
        >>> print(rules_for("run", "hf", "gpt2", {"model_type": "gpt2"}))
        tie lm_head.weight to transformer.wte.weight
        rearrange transformer.h.{i}.attn.c_attn.weight, transformer.h.{i}.attn.c_proj.weight, transformer.h.{i}.mlp.c_fc.weight, transformer.h.{i}.mlp.c_proj.weight: o i -> i o
    """
    if family is None:
        return None
    if _HAS_HUB_NAMES.get(source_format) == (to == "hf"):
        raise InvalidArgument("convert.rules", expected="one side with the names of a hub, and one with those of the reference code",
                              found=f"{source_format} to {to}", fix="leave out --rules: both sides have the same names")  # fmt: skip
    if family == _TRANSFORMERS and config is None:
        raise InvalidArgument("convert.rules", expected="the config.json of the model, which names its family", found="none", fix="give it with --like")  # fmt: skip
    whole = hub_rules(family) if config is None else _of_config(family, config)
    return whole if to == "hf" else _inverse(whole)


def own_rules(given: object, name: str) -> Transform:
    """Rules of the user's own, which are applied as they are: a transform, or the export of a converter.

    Args:
        given: either of them.
        name: of it, for messages.

    Raises:
        InvalidArgument: for something else.

    Examples:
        >>> from trainfold.core.transform.naming import rename
        >>> print(own_rules(rename("net.{name*}", "{name*}"), "my_rules:rules"))
        rename net.{name*} -> {name*}
    """
    if isinstance(given, Converter) and not isinstance(given, type):
        return given.state_dict_transform
    if isinstance(given, Transform) and not isinstance(given, type):
        return given
    raise InvalidArgument("convert.rules", expected=f"a transform or a converter as {name}", found=shown(given),
                          fix="name an object, such as one that trainfold.transforms.compose has made")  # fmt: skip


def with_converters(
    rules: Transform | None, *, adapter: Mapping[str, object] | None, quantised: Mapping[str, object] | None
) -> Transform | None:
    """Rules after what makes plain weights: scales are multiplied, then adapters are merged.

    Args:
        rules: for the names of plain weights; None for none.
        adapter: the configuration of an adapter of peft; None for none.
        quantised: the model's ``config.json``, if it says how weights are quantised that are to be plain; None to leave them.

    Raises:
        InvalidArgument: for a configuration that is not known.

    Examples:
        >>> print(with_converters(None, adapter=None, quantised={"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
        dequantise {path*}.weight by {path*}.weight_scale_inv in blocks of [128, 128] to bfloat16 (no inverse)
    """
    found: list[Transform] = [] if quantised is None else [dequantise_of(quantised)]
    if quantised is not None and quantised.get("quantization_config") is None:
        raise InvalidArgument(
            "convert.dequantise", expected="quantization_config in the config.json of the model", found="none",
            fix="give the config.json with --like; for other scales write a transform, with trainfold.transforms.quantised")  # fmt: skip
    found += [each for each in (None if adapter is None else lora_of(adapter), rules) if each is not None]
    return compose(*found) if len(found) > 1 else next(iter(found), None)


def check_without_adapters(names: Iterable[str], to: str) -> None:
    """Refuse what programs would not find in a directory of a hub.

    Args:
        names: of what is written.
        to: one of `TARGETS`.

    Raises:
        InvalidArgument: for the names of layers that adapters wrap.
    """
    odd = next(
        (name for name in names if to == "hf" and (".base_layer." in name or is_of_adapter(name, "default"))), None
    )
    if odd is not None:
        raise InvalidArgument(
            "convert", expected="the names of a model without adapters", found=odd,
            fix="merge them: --lora adapter_config.json. Adapters alone are written by trainfold.weights.write_adapter_directory")  # fmt: skip


def is_of_hub(a: str, b: str) -> bool:
    """Whether the first of two sides has the names of a hub, if rules are to lead from one to the other.

    Args:
        a: its format.
        b: that of the other.

    Raises:
        InvalidArgument: if both have the same names, or both may have either.

    Examples:
        >>> is_of_hub("torch", "run"), is_of_hub("torch", "hf")
        (True, False)
    """
    mine, theirs = _HAS_HUB_NAMES.get(a), _HAS_HUB_NAMES.get(b)
    if mine == theirs:
        fix = "leave out --rules: both sides have the same names" if mine is not None else "convert one of them, with --rules if it has the names of the code, and compare the other with that"  # fmt: skip
        raise InvalidArgument("diff.rules", expected="one side with the names of a hub, and one with those of the reference code",
                              found=f"{a} and {b}", fix=fix)  # fmt: skip
    return mine if mine is not None else not theirs


def checked_target(name: str) -> str:
    """A checked target.

    Raises:
        InvalidArgument: for one that cannot be written.
    """
    return _among("convert.to", name, TARGETS)


def dtype_of(name: str | None) -> str | None:
    """The name that torch has for a dtype.

    Raises:
        InvalidArgument: for one that nothing is cast to.

    Examples:
        >>> dtype_of("bf16"), dtype_of(None)
        ('bfloat16', None)
    """
    return None if name is None else DTYPES[_among("convert.dtype", name, DTYPES)]


def _of_config(rules: str, config: Mapping[str, object]) -> Transform:
    family = config.get("model_type")
    if rules == _TRANSFORMERS:
        return hub_rules_of(config, code="transformers")
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

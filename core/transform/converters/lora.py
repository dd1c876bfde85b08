"""`lora`: the converter of low-rank adapters, which an export merges into the weights of the base."""

import re
from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any, Final, final

import attrs

from trainfold.core.checks import document, positive
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.transform.converters.low_rank import Decomposed, LowRank, PlusScaled
from trainfold.core.transform.expression import Expression
from trainfold.core.transform.name_template import Captures, NameTemplate, check_captures, template
from trainfold.core.transform.naming import form_of, put
from trainfold.core.transform.transform import Table

_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_OTHER_PARTS: Final = (
    ".lora_",
    ".modules_to_save.",
    ".original_module.",
)  # of peft, under names that are not known here
_SAVED: Final = re.compile(
    r"(.+)\.modules_to_save\.[^.]+\.(.+)", re.DOTALL
)  # the copy of a whole module that is trained
_ORIGINAL: Final = re.compile(r"(.+)\.original_module\.(.+)", re.DOTALL)  # and the module that it replaces
_EMBEDDINGS: Final = (
    ("a", template("{layer*}.lora_embedding_A.default")),
    ("b", template("{layer*}.lora_embedding_B.default")),
)  # parameters of peft, whose weight has its inputs first: a row for each token
_CHANGE_THE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")  # what peft may initialise an adapter by
_SLOW_PATTERN: Final = re.compile(r"\)[*+?{]|(?:[*+?{].*){5}", re.DOTALL)  # might look at one name for years


@final
@attrs.frozen
class LoRA:
    """See `lora`. It is a converter, and the transform that makes its export."""

    alpha: float
    is_rank_stabilised: bool
    is_transposed: bool
    a: NameTemplate
    b: NameTemplate
    bias: NameTemplate
    wrapped: NameTemplate
    plain: NameTemplate
    prefix: str
    alphas: tuple[tuple[str, float], ...]
    magnitude: NameTemplate
    is_decomposed: bool

    def __str__(self) -> str:
        own = "".join(f", {alpha:g} for {pattern}" for pattern, alpha in self.alphas)
        alpha = f"({self.alpha:g}{own})" if own else f"{self.alpha:g}"
        scale = f"{alpha} / {'sqrt(rank)' if self.is_rank_stabilised else 'rank'}"
        order = ", of weights with their inputs first" if self.is_transposed else ""
        lengths = f", rows as long as {self.magnitude}" if self.is_decomposed else ""
        return f"merge {self.b} times {self.a} times {scale} into {self.wrapped}{order}{lengths}, as {self.plain} (no inverse)"

    @property
    def inverse(self) -> None:
        """What was merged cannot be taken apart."""
        return

    @property
    def state_dict_transform(self) -> "LoRA":
        """See `Converter`."""
        return self

    def key_filter(self, name: str) -> bool:
        """See `Converter`."""
        forms = (self.a, self.b, self.bias, self.magnitude, *(form for _, form in _EMBEDDINGS))
        return any(each.match(name) is not None for each in forms) or _SAVED.fullmatch(name) is not None

    def state_dict_adapter(self, name: str) -> str:
        """See `Converter`.

        Raises:
            InvalidState: for a tensor of another adapter, which is neither this one's nor the base's.
        """
        captures, whole = self.wrapped.match(name), _ORIGINAL.fullmatch(name) or _SAVED.fullmatch(name)
        if whole is None:
            self._check_known((name,))
        plain = ".".join(whole.groups()) if whole else name if captures is None else self.plain.fill(captures)
        return plain.removeprefix(self.prefix)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`. A base that lies beside the adapters by its plain names, such as that of a hub, is merged as well."""
        parts: dict[Captures, dict[str, str]] = {}
        embeddings = set[Captures]()
        for name in table:
            for part, form in (
                ("a", self.a),
                ("b", self.b),
                ("bias", self.bias),
                ("magnitude", self.magnitude),
                *_EMBEDDINGS,
            ):
                captures = form.match(name)
                if captures is not None:
                    parts.setdefault(captures, {})[part] = name
                    if (part, form) in _EMBEDDINGS:
                        embeddings.add(captures)
        base = {name: each for name, each in table.items() if not self.key_filter(name)}
        self._check_known(base)
        merged = dict(base)
        for captures, names in parts.items():
            where = self._place(captures, "weight", table)
            alpha = self._alpha(dict(captures)["layer"].removeprefix(self.prefix))
            own = {part: table[name] for part, name in names.items()}
            merged[where] = self._merged(
                where, own, base.get(where), alpha, is_transposed=self.is_transposed or captures in embeddings
            )
            if "bias" in own:
                place = self._place(captures, "bias", table)
                merged[place] = self._with_bias(place, own, base.get(place), alpha)
        saved = put(
            str(self), ((self.state_dict_adapter(name), table[name]) for name in table if _SAVED.fullmatch(name))
        )
        done = put(str(self), ((self.state_dict_adapter(name), each) for name, each in merged.items()))
        return {**done, **saved}

    def _place(self, captures: Captures, tensor: str, table: Table) -> str:
        """The name of a tensor of the base: that of a wrapped layer, or the plain one."""
        wrapped = self.wrapped.fill((*captures, ("tensor", tensor)))
        plain = self.state_dict_adapter(wrapped)
        return plain if plain in table and wrapped not in table else wrapped

    def _alpha(self, layer: str) -> float:
        """That of the first pattern that is a layer's name, or its end from a dot on; as `peft` finds it."""
        found = (alpha for pattern, alpha in self.alphas if re.match(rf"(.*\.)?({pattern})$", layer))
        return next(found, self.alpha)

    def _merged(
        self, where: str, parts: Mapping[str, Expression], base: Expression | None, alpha: float, *, is_transposed: bool
    ) -> LowRank | Decomposed:
        a, b = parts.get("a"), parts.get("b")
        shape = None if base is None else base.shape[::-1] if is_transposed else base.shape
        if (
            a is None or b is None or base is None or shape is None
            or (len(a.shape), len(b.shape), len(shape)) != (2, 2, 2)
            or a.shape[0] != b.shape[1]
            or (b.shape[0], a.shape[1]) != shape
        ):  # fmt: skip
            raise InvalidState(
                where,
                expected="a matrix, and the two of its adapter, (rank, inputs) and (outputs, rank)",
                found=f"{form_of(base)}, {form_of(a)} and {form_of(b)}",
                fix="export the base together with its adapters; pass fan_in_fan_out=True if weights have their inputs first, as those of GPT-2",
            )
        if base.dtype not in _FLOATS:
            raise InvalidState(
                where, expected="a floating base", found=base.dtype,
                fix="dequantise it first: chain(quantised(...), lora(...))")  # fmt: skip
        merged = LowRank(base, a, b, self._scale(alpha, a.shape[0]), is_transposed)
        magnitude = parts.get("magnitude")
        if self.is_decomposed != (magnitude is not None) or (
            magnitude is not None and magnitude.shape != (b.shape[0],)
        ):
            raise InvalidState(
                where, expected=f"the length of each of {b.shape[0]} rows" if self.is_decomposed else "matrices of low rank alone",
                found=form_of(magnitude), fix="pass the configuration of this adapter to lora_of, or decomposed= as use_dora there")  # fmt: skip
        return merged if magnitude is None else Decomposed(merged, magnitude)

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (sqrt(rank) if self.is_rank_stabilised else rank) if rank else 0.0

    def _with_bias(
        self, where: str, parts: Mapping[str, Expression], base: Expression | None, alpha: float
    ) -> PlusScaled:
        """The bias of a layer whose adapter has one, too."""
        own, a = parts["bias"], parts["a"]
        if base is None or base.shape != own.shape or base.dtype not in _FLOATS or self.is_decomposed:
            raise InvalidState(
                where, expected="a floating bias of the layer, to which that of its adapter is added", found=f"{form_of(base)}, and {form_of(own)} in the adapter",
                fix="make the adapter without lora_bias where the layer has no bias, or of DoRA: peft cannot merge it either")  # fmt: skip
        return PlusScaled(base, own, self._scale(alpha, a.shape[0]))

    def _check_known(self, base: Iterable[str]) -> None:
        odd = [
            name for name in base if any(part in f".{name}" for part in _OTHER_PARTS) and not _ORIGINAL.fullmatch(name)
        ]
        if odd:
            raise InvalidState(
                odd[0], expected="matrices of low rank alone, and the base", found=f"other parts of an adapter: {', '.join(odd[:8])}",
                fix="give the names that the matrices of this model have, a= and b=; merge other kinds of adapters with the tools of their library")  # fmt: skip


def lora(  # noqa: PLR0913 - keywords
    *,
    alpha: float,
    rank_stabilised: bool = False,
    fan_in_fan_out: bool = False,
    a: str = "{layer*}.lora_A.default.weight",
    b: str = "{layer*}.lora_B.default.weight",
    bias: str = "{layer*}.lora_B.default.bias",
    wrapped: str = "{layer*}.base_layer.{tensor}",
    prefix: str = "base_model.model.",
    alphas: Mapping[str, float] | None = None,
    magnitude: str = "{layer*}.lora_magnitude_vector.default.weight",
    decomposed: bool = False,
) -> LoRA:
    """The converter of low-rank adapters: an export has ``base + b a alpha / rank``, by the names of the base.

    The defaults are the names of `peft` in a model. Whole modules that are trained beside the adapters, as its ``modules_to_save`` are, take the place of those of the base. So do the weights of embeddings with the matrices that `peft` gives them. The rank is that of each pair. Sums are in float32, or float64 for such a base, and rounded once; they may differ
    from those of another library in the last bits.

    Args:
        alpha: the numerator of the scale.
        rank_stabilised: whether it is divided by the root of the rank.
        fan_in_fan_out: whether weights have their inputs first, as the layers of GPT-2.
        a: the names of the matrices of shape (rank, inputs), with ``{layer*}``.
        b: those of shape (outputs, rank).
        bias: the names of what is added to the biases of layers, times the same number, where an adapter has that.
        wrapped: the names of the tensors of a wrapped layer, with ``{layer*}`` and ``{tensor}``.
        prefix: what the names of the model begin with, and those of the base do not.
        magnitude: the names of the lengths of rows, with ``{layer*}``.
        decomposed: whether each pair has such lengths, as DoRA trains them: a row of the result is as long. The length of a row that is 0 is an error of the model, and gives NaN, as in `peft`.
        alphas: pattern of names of layers -> the numerator of theirs, as ``alpha_pattern`` of `peft`: a regular expression for the name, or for its end from a dot on. The first one counts.

    Raises:
        InvalidArgument: for a number that is not above 0, templates with other captures, and patterns that are not regular expressions, or slow ones.

    Examples:
        >>> import torch
        >>> from trainfold.core.transform.apply import transform_tensors
        >>> tensors = {"q.base_layer.weight": torch.ones(2, 2), "q.lora_A.default.weight": torch.ones(1, 2), "q.lora_B.default.weight": torch.ones(2, 1)}
        >>> dict(transform_tensors(lora(alpha=2), tensors))
        {'q.weight': tensor([[3., 3.],
                [3., 3.]])}
    """
    one, other, of = template(a), template(b), template(wrapped)
    check_captures("lora", one, other)
    lengths, added = template(magnitude), template(bias)
    check_captures("lora", one, lengths)
    check_captures("lora", one, added)
    if one.captures != ("layer*",) or of.captures != ("layer*", "tensor"):
        raise InvalidArgument(
            "lora", expected="{layer*} in a= and b=, and {layer*} and {tensor} in wrapped=", found=f"{a}, {b} and {wrapped}",
            fix="write the names as in the model, such as a='{layer*}.a', wrapped='{layer*}.base_layer.{tensor}'")  # fmt: skip
    patterns = document("lora.alphas", {} if alphas is None else alphas, fix="pass alpha_pattern of the adapter")
    numbers = tuple((_pattern(pattern), positive(f"lora.alphas[{pattern!r}]", each, fix="pass alpha_pattern of the adapter")) for pattern, each in patterns.items())  # fmt: skip
    return LoRA(positive("lora.alpha", alpha, fix="pass lora_alpha of the adapter"), rank_stabilised, fan_in_fan_out, one, other, added, of, template("{layer*}.{tensor}"), prefix, numbers, lengths, decomposed)  # fmt: skip


def _pattern(text: str) -> str:
    problem = "a pattern that may take long" if _SLOW_PATTERN.search(text) else ""
    try:
        re.compile(text)
    except re.error as error:
        problem = str(error)
    if problem:
        raise InvalidArgument("lora.alphas", expected="the name of a layer, or a simple regular expression", found=f"{text!r}: {problem}",
                              fix="write the names out, one entry each")  # fmt: skip
    return text


def lora_of(config: Mapping[str, Any]) -> LoRA:
    """The converter of an adapter of `peft`, by its ``adapter_config.json``.

    Args:
        config: as ``json`` reads it.

    Raises:
        InvalidArgument: for another kind of adapter, for settings that merging does not know, at once, and for one whose initialisation has changed the base.

    Examples:
        >>> lora_of({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_rslora": True}).is_rank_stabilised
        True
    """
    document("lora_of.config", config, fix="pass what is in adapter_config.json: json.loads(text)")
    odd = {key: config[key] for key, plain in _PLAIN.items() if config.get(key, plain[0]) not in plain}
    if odd:
        raise InvalidArgument(
            "lora_of.config", expected="an adapter of LoRA or DoRA", found=odd,
            fix="merge it with the tools of peft: model.merge_and_unload()")  # fmt: skip
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGE_THE_BASE):
        raise InvalidArgument(
            "lora_of.config", expected="an adapter of the base as it was", found=f"init_lora_weights={initial!r}, which has changed the base too, so that the base of a hub does not go with it",
            fix="save it in peft as an adapter of that base: model.save_pretrained(path, path_initial_model_for_weight_conversion=...); or, "
            "where the weights have the base as it was changed, name the scale: lora(alpha=lora_alpha)")  # fmt: skip
    return lora(
        alpha=config.get("lora_alpha", 8),
        rank_stabilised=bool(config.get("use_rslora", False)),
        fan_in_fan_out=bool(config.get("fan_in_fan_out", False)),
        alphas=config.get("alpha_pattern"),
        decomposed=bool(config.get("use_dora", False)),
    )


_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    **dict.fromkeys(("use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens", "arrow_config"), (None,)),
    "bias": ("none", None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}

"""`Converter`: what a program adds to the weights of a model. `view`: the full weights, those of the base, those that were added, and an export."""

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, final, get_args, runtime_checkable

import attrs

from trainfold.core.checks import choice
from trainfold.core.errors import InvalidArgument
from trainfold.core.transform.expression import Expression
from trainfold.core.transform.naming import put
from trainfold.core.transform.transform import Composed, Table, Transform, compose

View: TypeAlias = Literal["full", "base", "owned", "export"]
"""``full``: everything. ``owned``: what the converter has added. ``base``: the rest, by the names that it has without the converter. ``export``: what a program without the converter loads."""


@runtime_checkable
class Converter(Protocol):
    """What a program adds to the weights of a model, such as the adapters of LoRA or the scales of a quantised model.

    Laws: a tensor is owned or of the base, by its name alone. No two tensors of the base have one name outside. The export has the names of the base, and
    no others. `trainfold.properties.contracts.check_converter` tests them.
    """

    def key_filter(self, name: str) -> bool:
        """Whether the converter has added a tensor of this name; the others are of the base."""

    def state_dict_adapter(self, name: str) -> str:
        """The name that a tensor of the base has in a model without the converter."""

    @property
    def state_dict_transform(self) -> Transform:
        """What makes an export of the full weights: added tensors are merged into those of the base, or left out."""


@final
@attrs.frozen
class Chained:
    """See `chain`."""

    converters: tuple[Converter, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.converters)) if self.converters else "nothing"

    @property
    def state_dict_transform(self) -> Composed:
        """See `Converter`."""
        return compose(*(each.state_dict_transform for each in self.converters))

    def key_filter(self, name: str) -> bool:
        """See `Converter`."""
        return self._outside(name) is None

    def state_dict_adapter(self, name: str) -> str:
        """See `Converter`."""
        found = self._outside(name)
        return name if found is None else found

    def _outside(self, name: str) -> str | None:
        """The name of a tensor of the base; None for what a converter has added."""
        for each in self.converters:
            if each.key_filter(name):
                return None
            name = each.state_dict_adapter(name)
        return name


def chain(*converters: Converter) -> Chained:
    """Several converters of one model as one, such as adapters on a quantised base.

    Args:
        converters: in the order in which an export is made. Each has the names that those before it have left: ``chain(quantised(...), lora(...))`` multiplies the scales of the full
            weights, and then merges.

    Raises:
        InvalidArgument: for something else than a converter.

    Examples:
        >>> from trainfold.core.transform.converters.lora import lora
        >>> from trainfold.core.transform.converters.quantised import quantised
        >>> both = chain(quantised("{layer*}.weight", "{layer*}.weight_scale"), lora(alpha=2))
        >>> [name for name in ("q.base_layer.weight", "q.base_layer.weight_scale", "q.lora_A.default.weight") if not both.key_filter(name)]
        ['q.base_layer.weight']
        >>> both.state_dict_adapter("q.base_layer.weight")
        'q.weight'
    """
    for each in converters:
        _check(each, "chain.converters")
    return Chained(converters)


@final
@attrs.frozen
class Viewed:
    """See `view`."""

    converter: Converter
    is_owned: bool

    def __str__(self) -> str:
        return f"{'what is added' if self.is_owned else 'the base'} by {self.converter} (no inverse)"

    @property
    def inverse(self) -> None:
        """What is left out cannot be put back."""
        return

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        name_of: Callable[[str], str] = str if self.is_owned else self.converter.state_dict_adapter
        chosen = [(name, each) for name, each in table.items() if self.converter.key_filter(name) == self.is_owned]
        return put(str(self), ((name_of(name), each) for name, each in chosen))


def view(converter: Converter, which: View) -> Transform:
    """A part of the weights of a model that has a converter, as a transform.

    Args:
        converter: that the model has.
        which: one of `View`. The base and what is owned have every tensor of the full weights once.

    Raises:
        InvalidArgument: for another view, or something else than a converter.

    Examples:
        >>> from trainfold.core.layout.leaf_spec import LeafSpec
        >>> from trainfold.core.transform.apply import transform_specs
        >>> from trainfold.core.transform.converters.lora import lora
        >>> specs = {"q.base_layer.weight": LeafSpec("float32", (4, 2)), "q.lora_A.default.weight": LeafSpec("float32", (1, 2)),
        ...          "q.lora_B.default.weight": LeafSpec("float32", (4, 1))}
        >>> {which: list(transform_specs(view(lora(alpha=2), which), specs)) for which in ("base", "owned", "export")}
        {'base': ['q.weight'], 'owned': ['q.lora_A.default.weight', 'q.lora_B.default.weight'], 'export': ['q.weight']}
    """  # fmt: skip
    _check(converter, "view.converter")
    choice("view.which", which, get_args(View), fix="see trainfold.transforms.view")
    if which == "full":
        return Composed(())
    return converter.state_dict_transform if which == "export" else Viewed(converter, which == "owned")


def _check(converter: object, where: str) -> None:
    if not isinstance(converter, Converter):
        raise InvalidArgument(
            where, expected="an object with key_filter, state_dict_adapter and state_dict_transform", found=repr(converter),
            fix="pass one of trainfold.transforms, such as lora(alpha=16), or one's own that keeps trainfold.transforms.Converter")  # fmt: skip

"""`LoadSpec`: one source of several, which tensors of the model it is for, and how strictly."""

from collections.abc import Iterable
from typing import Literal, TypeAlias, final, get_args

import attrs

from trainfold.core.checks import choice
from trainfold.core.errors import InvalidArgument
from trainfold.core.transform.name_template import NameTemplate, matching, templates
from trainfold.core.weights.source import WeightSource
from trainfold.core.weights.wrapped import ByScript, Frozen, is_list

Strictness: TypeAlias = Literal["used", "filled", "exact", "any"]
"""``used``: all that the source has is used. ``filled``: it has all that it is for. ``exact``: both. ``any``: neither, but one tensor at least."""


def _names_given(names: str | NameTemplate | Iterable[str | NameTemplate] | None) -> tuple[NameTemplate, ...] | None:
    return None if names is None else templates(names)


@final
@attrs.frozen
class LoadSpec:
    """What is loaded from one of several sources; see `SeveralSources`.

    Attributes:
        source: of the weights.
        names: the tensors of the model that it is for, as templates such as ``layers.{i}.{path*}``; None for whatever it has.
        strict: what must fit. ``used``: every tensor that it has, and that ``names`` does not leave out, is a tensor of the model. ``filled``: it has every
            tensor that it is for. ``exact``: both. ``any``: neither. A source of which nothing is used is refused in every mode, and so are other
            shapes and dtypes.
        overrides: whether it may have what an earlier source has too, and then counts. Otherwise such an overlap is refused.

    Raises:
        InvalidArgument: for something else than a source, an unknown mode or a text that is not a template.

    Examples:
        >>> LoadSpec(ByScript(), names="head.{name}").takes("head.weight")
        True
    """

    source: WeightSource
    names: tuple[NameTemplate, ...] | None = attrs.field(default=None, converter=_names_given, kw_only=True)
    strict: Strictness = attrs.field(default="used", kw_only=True)
    overrides: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check what was given."""
        if is_list(self.source):
            raise InvalidArgument("LoadSpec.source", expected="one source", found=type(self.source).__qualname__,
                                  fix="write one list: SeveralSources([*others.sources, ...])")  # fmt: skip
        if not isinstance(self.source, WeightSource) or isinstance(self.source, Frozen):
            raise InvalidArgument(
                "LoadSpec.source", expected="a WeightSource", found=repr(self.source),
                fix="pass one of trainfold.weights; Frozen(...) goes around all of them: Frozen(SeveralSources([...]))")  # fmt: skip
        choice("LoadSpec.strict", self.strict, get_args(Strictness), fix="see trainfold.weights.LoadSpec")

    def takes(self, name: str) -> bool:
        """Whether it is for a tensor of the model."""
        return self.names is None or name in matching(self.names, [name])

    @property
    def is_rest(self) -> bool:
        """Whether it leaves to the script whatever no source has."""
        return isinstance(self.source, ByScript) and self.names is None

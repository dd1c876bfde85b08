"""`NameTemplate`: a pattern of names such as ``layers.{i}.attention.wq.weight``, which takes a name apart and puts another together."""

import re
from collections.abc import Iterable
from typing import Final, TypeAlias, final

import attrs

from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown

Captures: TypeAlias = tuple[tuple[str, str], ...]
"""Capture -> its text, sorted by capture."""

_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*\*?")


@final
@attrs.frozen
class NameTemplate:
    """A pattern of names. ``{i}`` stands for a text without a dot, and ``{path*}`` for one that may have dots.

    Law: ``fill(match(name)) == name``, and a name is matched in one way only. For that there is at most one capture between two dots, and at most one with a star.

    Attributes:
        text: as it was written.
        captures: the names of its captures, sorted, with their stars.

    Examples:
        >>> each = template("layers.{i}.wq.weight")
        >>> each.match("layers.3.wq.weight"), each.match("layers.3.wk.weight"), each.fill((("i", "7"),))
        ((('i', '3'),), None, 'layers.7.wq.weight')
    """

    text: str
    captures: tuple[str, ...]
    _regex: re.Pattern[str] = attrs.field(repr=False, eq=False)
    _form: str = attrs.field(repr=False, eq=False)
    _literal: str = attrs.field(repr=False, eq=False)

    def __str__(self) -> str:
        return self.text

    def match(self, name: str) -> Captures | None:
        """The captures of a name; None for a name of another form."""
        return self.among((name,)).get(name)

    def among(self, names: Iterable[str]) -> dict[str, Captures]:
        """The captures of each of some names that has this form.

        Examples:
            >>> template("{i}.w").among(["0.w", "0.b"])
            {'0.w': (('i', '0'),)}
        """
        literal = self._literal  # nearly all names do not have it, and a look for it takes a tenth of the time
        fullmatch, fields = self._regex.fullmatch, self._fields
        return {
            name: tuple([(each, found[each]) for each in fields])
            for name in names
            if literal in name and (found := fullmatch(name)) is not None
        }

    @property
    def _fields(self) -> tuple[str, ...]:
        """The captures without their stars, sorted."""
        return tuple(sorted(self._regex.groupindex))

    def fill(self, captures: Captures) -> str:
        """The name that has these captures."""
        return self._form.format_map(dict(captures))


def template(text: "str | NameTemplate") -> NameTemplate:
    """Read a template.

    Raises:
        InvalidArgument: if it is not a text, a brace is not closed, a capture has no name or two places, or a name could be matched in several ways.
    """
    if isinstance(text, NameTemplate):
        return text
    if not isinstance(text, str):
        raise InvalidArgument("template", expected="a name with captures, such as layers.{i}.weight or {path*}.weight", found=shown(text), fix="pass a text")  # fmt: skip
    names = [each.group(1) for each in _FIELD.finditer(text)]
    problem = _problem(text, names)
    if problem is not None:
        raise InvalidArgument(
            "template",
            expected="a name with captures, such as layers.{i}.weight or {path*}.weight",
            found=f"{text!r}: {problem}",
            fix="give each capture a name of its own, between dots of its own",
        )
    literals = [re.escape(each) for each in _FIELD.split(text)[::2]]
    groups = [f"(?P<{each[:-1]}>.+)" if each[-1] == "*" else f"(?P<{each}>[^.]+)" for each in names]
    regex = re.compile("".join([*(a + b for a, b in zip(literals, groups, strict=False)), literals[-1]]), re.DOTALL)
    form = _FIELD.sub(lambda found: "{" + found.group(1).rstrip("*") + "}", text)
    return NameTemplate(text, tuple(sorted(names)), regex, form, max(_FIELD.split(text)[::2], key=len))


def _problem(text: str, names: list[str]) -> str | None:
    rest = _FIELD.sub("", text)
    bad = [each for each in names if not _NAME.fullmatch(each)]
    problems = {
        "it is empty": not text,
        "a brace is not closed": "{" in rest or "}" in rest,
        f"{bad[:1]} is not the name of a capture": bool(bad),
        "a capture has two places": len({each.rstrip("*") for each in names}) < len(names),
        "two captures may have dots": sum(each[-1:] == "*" for each in names) > 1,
        "two captures are in one part between dots": any(len(_FIELD.findall(part)) > 1 for part in text.split(".")),
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)


def templates(texts: "str | NameTemplate | Iterable[str | NameTemplate]") -> tuple[NameTemplate, ...]:
    """Read one template or several."""
    several = isinstance(texts, Iterable) and not isinstance(texts, str | NameTemplate)
    return tuple(map(template, texts if several else (texts,)))  # type: ignore[arg-type]


def check_captures(where: str, one: NameTemplate, other: NameTemplate) -> None:
    """Check that names of the one can be made into names of the other, and back.

    Raises:
        InvalidArgument: if they have other captures.
    """
    if one.captures != other.captures:
        raise InvalidArgument(
            where,
            expected=f"the captures of {one}: {', '.join(one.captures) or 'none'}",
            found=f"{other}, which has {', '.join(other.captures) or 'none'}",
            fix="use each capture on both sides, with or without a star: without it two tensors would get one name",
        )


def matching(templates: Iterable[NameTemplate], names: Iterable[str]) -> dict[str, None]:
    """Those of some names that have one of these forms: first those that have the first one."""
    every = list(names)
    return {name: None for each in templates for name in each.among(every)}

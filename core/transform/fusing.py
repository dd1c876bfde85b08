"""Transforms that put tensors together and take them apart: `merge` and `split` along a dimension, `stack` and `unstack` along a new one."""

from collections.abc import Iterable, Iterator
from typing import Final, final

import attrs

from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.json_values import shown
from trainfold.core.layout.slices import whole_box
from trainfold.core.transform.expression import CutOut, Expression, Joined, Lowered, Raised
from trainfold.core.transform.name_template import Captures, NameTemplate, check_captures, template, templates
from trainfold.core.transform.naming import check_new, form_of, put
from trainfold.core.transform.transform import Table

_MOST_DIMS: Final = 64  # of torch


@final
@attrs.frozen
class Fusion:
    """Which tensors are parts of one, and in which order its rows have theirs.

    Attributes:
        parts: the names of the parts.
        whole: the name of all of them together.
        dim: along which they lie.
        shares: how much of the whole each has, in relation to the others.
        groups: how often the parts take turns: in each of so many groups lies a piece of the first, then one of the second.
    """

    parts: tuple[NameTemplate, ...]
    whole: NameTemplate
    dim: int
    shares: tuple[int, ...]
    groups: int

    def __str__(self) -> str:
        of = "" if set(self.shares) == {1} else f" as {':'.join(map(str, self.shares))}"
        turns = "" if self.groups == 1 else f" in {self.groups} groups"
        return f"{' + '.join(map(str, self.parts))} = {self.whole}, dim {self.dim}{of}{turns}"

    def dim_of(self, name: str, shape: tuple[int, ...]) -> int:
        """The dimension, counted from the front.

        Raises:
            InvalidState: if the tensor has no such dimension.
        """
        if not -len(shape) <= self.dim < len(shape):
            raise InvalidState(name, expected=f"a dimension {self.dim}", found=list(shape), fix="pass another dim=")
        return self.dim % len(shape)

    def cut(self, name: str, each: Expression, pieces: tuple[int, ...]) -> list[list[Expression]]:
        """The pieces of a tensor: for each group those of each part.

        Raises:
            InvalidState: if it cannot be cut so.
        """
        dim = self.dim_of(name, each.shape)
        unit, rest = divmod(each.shape[dim], self.groups * sum(pieces))
        if rest:
            raise InvalidState(
                name, expected=f"a multiple of {self.groups * sum(pieces)} in dimension {dim}", found=list(each.shape),
                fix="give the shares and groups of this model, such as its numbers of heads")  # fmt: skip
        at, found = 0, []
        for _ in range(self.groups):
            row: list[Expression] = []
            for piece in pieces:
                box = list(whole_box(each.shape))
                box[dim] = at, at + piece * unit
                at += piece * unit
                row.append(each if piece * unit == each.shape[dim] else CutOut(each, tuple(box)))
            found.append(row)
        return found


@final
@attrs.frozen
class Merge:
    """See `merge`."""

    by: Fusion

    def __str__(self) -> str:
        return f"merge {self.by}"

    @property
    def inverse(self) -> "Split":
        """The parts again."""
        return Split(self.by)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        sets: dict[Captures, dict[NameTemplate, str]] = {}
        places: dict[str, Captures] = {}
        for part in self.by.parts:
            for name, captures in part.among(table).items():
                sets.setdefault(captures, {})[part] = name
                places[name] = captures
        missing = [
            each.fill(captures) for captures, found in sets.items() for each in self.by.parts if each not in found
        ]
        if missing:
            raise InvalidState(str(self), expected="all parts of each whole", found=f"no {', '.join(missing[:8])}",
                               fix="rename the parts to these names before")  # fmt: skip
        check_new(self, table, places, self.by.whole)
        return put(str(self), self._made(table, sets, places))

    def _made(
        self, table: Table, sets: dict[Captures, dict[NameTemplate, str]], places: dict[str, Captures]
    ) -> Iterator[tuple[str, Expression]]:
        for name, each in table.items():
            captures = places.get(name)
            if captures is None:
                yield name, each
            elif sets[captures][self.by.parts[0]] == name:  # the whole comes where its first part was
                yield (
                    self.by.whole.fill(captures),
                    self._whole([(one, table[one]) for one in (sets[captures][part] for part in self.by.parts)]),
                )

    def _whole(self, parts: list[tuple[str, Expression]]) -> Expression:
        name, first = parts[0]
        dim = self.by.dim_of(name, first.shape)
        sizes = [each.shape[dim : dim + 1] for _, each in parts]
        unit = sizes[0][0] // self.by.shares[0]
        for (part, each), share in zip(parts, self.by.shares, strict=True):
            shape = (*first.shape[:dim], share * unit, *first.shape[dim + 1 :])
            if (each.dtype, each.shape) != (first.dtype, shape):
                raise InvalidState(
                    part, expected=f"{first.dtype}{list(shape)}, beside {name}", found=form_of(each),
                    fix="give the shares of this model, such as its numbers of heads, or cast before")  # fmt: skip
        cuts = [self.by.cut(part, each, (1,)) for part, each in parts]
        pieces = [cut[group][0] for group in range(self.by.groups) for cut in cuts]
        return pieces[0] if len(pieces) == 1 else Joined(tuple(pieces), dim)


@final
@attrs.frozen
class Split:
    """See `split`."""

    by: Fusion

    def __str__(self) -> str:
        return f"split {self.by}"

    @property
    def inverse(self) -> Merge:
        """The whole again."""
        return Merge(self.by)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        return put(str(self), self._made(table))

    def _made(self, table: Table) -> Iterator[tuple[str, Expression]]:
        wholes = self.by.whole.among(table)
        check_new(self, table, wholes, *self.by.parts)
        for name, each in table.items():
            captures = wholes.get(name)
            if captures is None:
                yield name, each
                continue
            rows = self.by.cut(name, each, self.by.shares)
            for place, part in enumerate(self.by.parts):
                pieces = tuple(row[place] for row in rows)
                yield (
                    part.fill(captures),
                    pieces[0] if len(pieces) == 1 else Joined(pieces, self.by.dim_of(name, each.shape)),
                )


@final
@attrs.frozen
class Stack:
    """See `stack`."""

    each: NameTemplate
    into: NameTemplate
    over: str

    def __str__(self) -> str:
        return f"stack {self.each} over {self.over} = {self.into}"

    @property
    def inverse(self) -> "Unstack":
        """The tensors again."""
        return Unstack(self.each, self.into, self.over)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        stacks: dict[Captures, dict[str, Expression]] = {}
        found: list[tuple[str, Captures | Expression]] = []
        parts = self.each.among(table)
        check_new(self, table, parts, self.into)
        for name, each in table.items():
            captures = parts.get(name)
            if captures is None:
                found.append((name, each))
                continue
            rest = tuple(pair for pair in captures if pair[0] != self.over)
            if rest not in stacks:
                found.append((self.into.fill(rest), rest))
            stacks.setdefault(rest, {})[dict(captures)[self.over]] = each
        return put(
            str(self),
            ((name, self._stacked(name, stacks[what]) if isinstance(what, tuple) else what) for name, what in found),
        )

    def _stacked(self, name: str, parts: dict[str, Expression]) -> Expression:
        numbers = [str(number) for number in range(len(parts))]
        if parts.keys() != set(numbers):
            raise InvalidState(name, expected=f"tensors for each {{{self.over}}} of 0 to {len(parts) - 1}", found=", ".join(sorted(parts)[:8]),
                               fix="stack what is numbered from 0, without gaps")  # fmt: skip
        first = parts["0"]
        for number in numbers:
            if (parts[number].dtype, parts[number].shape) != (first.dtype, first.shape):
                raise InvalidState(name, expected=f"{form_of(first)} for each {{{self.over}}}", found=f"{form_of(parts[number])} for {number}",
                                   fix="stack tensors of one dtype and shape")  # fmt: skip
        return Joined(tuple(Raised(parts[number]) for number in numbers), 0)


@final
@attrs.frozen
class Unstack:
    """See `unstack`."""

    each: NameTemplate
    into: NameTemplate
    over: str

    def __str__(self) -> str:
        return f"unstack {self.into} = {self.each} over {self.over}"

    @property
    def inverse(self) -> Stack:
        """The stack again."""
        return Stack(self.each, self.into, self.over)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        return put(str(self), self._made(table))

    def _made(self, table: Table) -> Iterator[tuple[str, Expression]]:
        stacks = self.into.among(table)
        check_new(self, table, stacks, self.each)
        for name, each in table.items():
            captures = stacks.get(name)
            if captures is None:
                yield name, each
                continue
            if not each.shape or not each.shape[0]:
                raise InvalidState(name, expected="a first dimension of at least 1", found=list(each.shape), fix="unstack tensors that were stacked")  # fmt: skip
            for number in range(each.shape[0]):
                box = ((number, number + 1), *whole_box(each.shape)[1:])
                yield self.each.fill((*captures, (self.over, str(number)))), Lowered(CutOut(each, box))


def merge(
    parts: Iterable[str | NameTemplate],
    into: str | NameTemplate,
    *,
    dim: int = 0,
    shares: Iterable[int] | None = None,
    groups: int = 1,
) -> Merge:
    """Put tensors together into one, such as the queries, keys and values of an attention.

    Args:
        parts: two or more templates of names, with the same captures.
        into: the name of the whole, with these captures.
        dim: along which they lie.
        shares: how large the parts are in relation to each other, such as the numbers of heads; by default they are equally large.
        groups: how often they take turns, such as the number of key heads where each follows the queries that use it.

    Raises:
        InvalidArgument: for templates with other captures, and other numbers than these.
    """  # fmt: skip
    found = templates(parts)
    if not isinstance(shares, Iterable | None):
        raise InvalidArgument("merge.shares", expected="a number for each part", found=shown(shares), fix="pass the numbers of heads, such as (4, 2, 2)")  # fmt: skip
    by = Fusion(found, template(into), dim, (1,) * len(found) if shares is None else tuple(shares), groups)
    return Merge(_checked(by))


def split(
    whole: str | NameTemplate,
    parts: Iterable[str | NameTemplate],
    *,
    dim: int = 0,
    shares: Iterable[int] | None = None,
    groups: int = 1,
) -> Split:
    """Take a tensor apart: the inverse of `merge`, with the same arguments."""  # fmt: skip
    return merge(parts, whole, dim=dim, shares=shares, groups=groups).inverse


def stack(each: str | NameTemplate, into: str | NameTemplate, *, over: str) -> Stack:
    """Put tensors of one shape into one with a dimension more, in front: the weights of experts, of layers.

    Args:
        each: the names of the tensors, such as ``layers.{i}.experts.{e}.w1``.
        into: the name of the stack, with all captures but one.
        over: that capture; its texts are the numbers from 0.

    Raises:
        InvalidArgument: for other captures.
    """
    return Stack(*_stacking("stack", each, into, over))


def unstack(whole: str | NameTemplate, each: str | NameTemplate, *, over: str) -> Unstack:
    """Make tensors of what lies along the first dimension of one: the inverse of `stack`."""
    return Unstack(*_stacking("unstack", each, whole, over))


def _checked(by: Fusion) -> Fusion:
    """Check the arguments of `merge` and `split`."""
    for each in by.parts:
        check_captures("merge", by.whole, each)
    if len(by.parts) < 2 or len(set(by.parts)) < len(by.parts) or len(by.shares) != len(by.parts):
        raise InvalidArgument(
            "merge", expected="two or more parts, each once, and a share for each",
            found=f"{len(by.parts)} parts, {len(by.shares)} shares", fix="name the parts, such as the weights of queries, keys and values")  # fmt: skip
    for share in by.shares:
        count("merge.shares", share, fix="pass the numbers of heads")
    count(
        "merge.dim",
        by.dim,
        least=-_MOST_DIMS,
        below=_MOST_DIMS,
        fix="pass the dimension along which the parts lie; -1 is the last",
    )
    count("merge.groups", by.groups, fix="pass how often the parts take turns")
    return by


def _stacking(
    where: str, each: str | NameTemplate, into: str | NameTemplate, over: str
) -> tuple[NameTemplate, NameTemplate, str]:
    one, whole = template(each), template(into)
    if over not in one.captures or "*" in over or sorted((*whole.captures, over)) != sorted(one.captures):
        raise InvalidArgument(where, expected=f"the captures of {one} without {over!r}", found=f"{whole}", fix="leave out of the stack what numbers its parts, and nothing else")  # fmt: skip
    return one, whole, over

"""Transforms of names: `rename`, `keep`, `drop`, `tie` and `untie`."""

from collections.abc import Iterable
from typing import final

import attrs

from trainfold.core.errors import InvalidState
from trainfold.core.transform.expression import Expression, SameAs
from trainfold.core.transform.name_template import NameTemplate, check_captures, matches, template, templates
from trainfold.core.transform.transform import Table


@final
@attrs.frozen
class Rename:
    """See `rename`."""

    old: NameTemplate
    new: NameTemplate

    def __str__(self) -> str:
        return f"rename {self.old} -> {self.new}"

    @property
    def inverse(self) -> "Rename":
        """The same with both sides exchanged."""
        return Rename(self.new, self.old)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        found = []
        for name, each in table.items():
            captures = self.old.match(name)
            if captures is None:
                check_new(str(self), name, self.new)
            found.append((name if captures is None else self.new.fill(captures), each))
        return put(str(self), found)


@final
@attrs.frozen
class Select:
    """See `keep` and `drop`."""

    names: tuple[NameTemplate, ...]
    keeps: bool

    def __str__(self) -> str:
        return f"{'keep' if self.keeps else 'drop'} {', '.join(map(str, self.names))} (no inverse)"

    @property
    def inverse(self) -> None:
        """What is left out cannot be put back."""
        return

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        return {name: each for name, each in table.items() if matches(self.names, name) == self.keeps}


@final
@attrs.frozen
class Tie:
    """See `tie`."""

    alias: NameTemplate
    name: NameTemplate

    def __str__(self) -> str:
        return f"tie {self.alias} to {self.name}"

    @property
    def inverse(self) -> "Untie":
        """The alias comes back."""
        return Untie(self.alias, self.name)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        found = dict(table)
        pairs = [(self.alias.fill(each), name) for name in table if (each := self.name.match(name)) is not None]
        pairs += [(name, self.name.fill(each)) for name in table if (each := self.alias.match(name)) is not None]
        for alias, name in dict.fromkeys(pairs):
            kept, other = table.get(name), table.get(alias)
            if kept is None or other is None or (kept.dtype, kept.shape) != (other.dtype, other.shape):
                raise InvalidState(
                    alias, expected=f"a tensor that is tied to {name}", found=f"{form_of(other)}, and {form_of(kept)} there",
                    fix="leave out this tie: the weights of this model are not tied so")  # fmt: skip
            found[name] = kept if kept == other else SameAs(kept, other, (name, alias))
            del found[alias]
        return found


@final
@attrs.frozen
class Untie:
    """See `untie`."""

    alias: NameTemplate
    name: NameTemplate

    def __str__(self) -> str:
        return f"untie {self.alias} from {self.name}"

    @property
    def inverse(self) -> Tie:
        """The alias is left out again."""
        return Tie(self.alias, self.name)

    def on(self, table: Table) -> dict[str, Expression]:
        """See `Transform`."""
        found = []
        for name, each in table.items():
            found.append((name, each))
            captures = self.name.match(name)
            if captures is not None:
                found.append((self.alias.fill(captures), each))
        return put(str(self), found)


def rename(old: str | NameTemplate, new: str | NameTemplate) -> Rename:
    """Give tensors other names.

    Args:
        old: a template of names, such as ``layers.{i}.wq.weight``; ``{path*}`` may have dots.
        new: a template with the same captures.

    Raises:
        InvalidArgument: for a text that is not a template, or other captures.
    """
    one, other = template(old), template(new)
    check_captures("rename", one, other)
    return Rename(one, other)


def keep(names: str | NameTemplate | Iterable[str | NameTemplate]) -> Select:
    """Leave out every tensor whose name is of none of these forms."""
    return Select(templates(names), keeps=True)


def drop(names: str | NameTemplate | Iterable[str | NameTemplate]) -> Select:
    """Leave out tensors whose name is of one of these forms."""
    return Select(templates(names), keeps=False)


def tie(alias: str | NameTemplate, name: str | NameTemplate) -> Tie:
    """Leave out a tensor that has the values of another one, as formats do that store tied weights once. Its inverse puts it back.

    Values are compared when the other one is computed: weights that only used to be tied are an error.
    """
    one, other = template(alias), template(name)
    check_captures("tie", one, other)
    return Tie(one, other)


def untie(alias: str | NameTemplate, name: str | NameTemplate) -> Untie:
    """Give a tensor another name beside the one that it has."""
    return tie(alias, name).inverse


def put(where: str, pairs: Iterable[tuple[str, Expression]]) -> dict[str, Expression]:
    """A table of these.

    Raises:
        InvalidState: if two tensors have one name.
    """
    found: dict[str, Expression] = {}
    twice: dict[str, None] = {}
    for name, each in pairs:
        if name in found:
            twice[name] = None
        found[name] = each
    if twice:
        raise InvalidState(
            where, expected="another name for each tensor", found=f"two that would be {', '.join([*twice][:8])}",
            fix="rename or drop one of them before")  # fmt: skip
    return found


def check_new(where: str, name: str, *made: NameTemplate) -> None:
    """Check that a tensor that stays has not the form of those that are made: the inverse would take it for one of them.

    Raises:
        InvalidState: if it has.
    """
    taken = next((each for each in made if each.match(name) is not None), None)
    if taken is not None:
        raise InvalidState(
            where, expected=f"no other tensor of the form {taken}", found=name,
            fix="see whether the tensors have these names already; rename or drop this one before")  # fmt: skip


def form_of(each: Expression | None) -> str:
    """The dtype and the shape of a tensor, or that it is missing."""
    return "nothing" if each is None else f"{each.dtype}{list(each.shape)}"

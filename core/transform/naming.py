"""Transforms of names: `rename`, `keep`, `drop`, `tie` and `untie`."""

from collections import Counter
from collections.abc import Container, Iterable
from typing import final

import attrs

from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.transform.expression import Expression, SameAs
from trainfold.core.transform.name_template import NameTemplate, check_captures, matching, template, templates
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
        captures = self.old.among(table)
        check_new(self, table, captures, self.new)
        if not captures:
            return dict(table)
        new = {name: self.new.fill(each) for name, each in captures.items()}
        names = [*map(new.get, table, table)]
        found = dict(zip(names, table.values(), strict=True))
        return found if len(found) == len(table) else put(str(self), zip(names, table.values(), strict=True))


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
        found = matching(self.names, table)
        return {name: each for name, each in table.items() if (name in found) == self.keeps}


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
        pairs = [(self.alias.fill(each), name) for name, each in self.name.among(table).items()]
        pairs += [(name, self.name.fill(each)) for name, each in self.alias.among(table).items()]
        for alias, name in dict.fromkeys(pairs):
            kept, other = table.get(name), table.get(alias)
            if alias == name:
                raise InvalidState(
                    alias, expected="another tensor that stays", found="this one itself", fix="write the names out, a tie for each tensor")  # fmt: skip
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
        captures, found = self.name.among(table), []
        for name, capture in captures.items():
            if (alias := self.alias.fill(capture)) in table:
                raise InvalidState(
                    str(self), expected=f"no {alias} beside {name}", found=f"{form_of(table[alias])} of that name",
                    fix="leave out this rule: the model has both names already. Of the rules for a hub, take those with tied=False, or of its config with tie_word_embeddings false")  # fmt: skip
        for name, each in table.items():
            found.append((name, each))
            if name in captures:
                found.append((self.alias.fill(captures[name]), each))
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

    Args:
        alias: a template of the names that are left out.
        name: a template of the names that stay, with the same captures.

    Raises:
        InvalidArgument: for a text that is not a template, other captures, and one name for both.
    """
    one, other = template(alias), template(name)
    check_captures("tie", one, other)
    if one == other:
        raise InvalidArgument("tie", expected="a name, and another one that stays", found=f"{one} twice", fix="name the tensor that has the same values")  # fmt: skip
    return Tie(one, other)


def untie(alias: str | NameTemplate, name: str | NameTemplate) -> Untie:
    """Give a tensor another name beside the one that it has."""
    return tie(alias, name).inverse


def put(where: str, pairs: Iterable[tuple[str, Expression]]) -> dict[str, Expression]:
    """A table of these.

    Raises:
        InvalidState: if two tensors have one name.
    """
    every = list(pairs)
    found = dict(every)
    twice = (
        []
        if len(found) == len(every)
        else [name for name, times in Counter(name for name, _ in every).items() if times > 1]
    )
    if twice:
        raise InvalidState(
            where, expected="another name for each tensor", found=f"two that would be {', '.join(twice[:8])}",
            fix="rename or drop one of them before")  # fmt: skip
    return found


def check_new(where: object, table: Table, changed: Container[str], *made: NameTemplate) -> None:
    """Check that tensors that stay have not the form of those that are made: the inverse would take them for such.

    Args:
        where: the rule.
        table: all tensors.
        changed: those that do not stay.
        made: what the names of those that are made look like.

    Raises:
        InvalidState: if one has.
    """
    for template_made in made:
        taken = next((name for name in template_made.among(table) if name not in changed), None)
        if taken is not None:
            raise InvalidState(
                str(where), expected=f"no other tensor of the form {template_made}", found=taken,
                fix="see whether the tensors have these names already; rename or drop this one before")  # fmt: skip


def form_of(each: Expression | None) -> str:
    """The dtype and the shape of a tensor, or that it is missing."""
    return "nothing" if each is None else f"{each.dtype}{list(each.shape)}"

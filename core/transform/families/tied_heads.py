"""Tied weights in a table: each name of a tensor as one of its own, and what a format keeps that stores it once."""

from collections.abc import Iterable, Mapping
from typing import Final

from trainfold.core.transform.expression import Expression
from trainfold.core.transform.families.family_tables import FAMILIES
from trainfold.core.transform.naming import Tie, tie
from trainfold.core.transform.transform import Composed, Table, Transform

_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("model.embed_tokens.weight", "transformer.wte.weight")


def with_aliases(table: Table, ties: Mapping[str, str], rules: Transform | None = None) -> dict[str, Expression]:
    """A table that has tied tensors under all of their names, as rules for models expect them.

    Args:
        table: with each tensor under its first name, or under more.
        ties: another name -> the first one.
        rules: a tie of a tensor that is there once is one of a model that computes its head from its embeddings. None for no rules.

    Examples:
        >>> from trainfold.core.transform.expression import SourceTensor
        >>> from trainfold.core.transform.naming import rename
        >>> from trainfold.core.transform.transform import compose
        >>> table = {"e": SourceTensor("e", "float32", (2,))}
        >>> list(with_aliases(table, {}, compose(tie("head", "e"), rename("e", "w"))))
        ['e', 'head']
    """
    found = {**table, **{alias: table[name] for alias, name in ties.items() if name in table and alias not in table}}
    for part in rules.parts if isinstance(rules, Composed) else (rules,):
        if isinstance(part, Tie):
            pairs = [(part.alias.fill(each), name) for name, each in part.name.among(found).items()]
            found |= {alias: found[name] for alias, name in pairs if alias not in found}
    return found


def ties_among(table: Table, ties: Mapping[str, str], *, first: Iterable[str] = ()) -> dict[str, str]:
    """Another name of a result -> its first one, of results that are made of tied tensors in one way.

    Args:
        table: of results.
        ties: of the tensors that they are made of.
        first: names that are to be first ones.
    """
    if not ties:
        return {}
    several, kept, found = {*ties.values()}, dict[Expression, str](), dict[str, str]()
    for name in (*(each for each in first if each in table), *table):
        if _is_of(table[name], several) and (other := kept.setdefault(table[name], name)) != name:
            found[name] = other
    return found


def by_convention(
    table: Table, ties: Mapping[str, str], *, is_tied: bool | None
) -> tuple[dict[str, Expression], dict[str, str]]:
    """Leave out what a hub does not store: a tied head, and other names of a tensor unless its head is not tied.

    Args:
        table: under the names of the hub.
        ties: of the source; what is made of tied tensors is the same expression.
        is_tied: whether the configuration ties the head to the embeddings; None if it is not known.

    Returns:
        The table, and what is left out -> the reason.

    Raises:
        InvalidState: if the head cannot be tied to the embeddings, because it has another dtype or shape.

    Examples:
        >>> from trainfold.core.transform.expression import SourceTensor
        >>> weight = SourceTensor("w", "float32", (2,))
        >>> table, left_out = by_convention({"model.embed_tokens.weight": weight, "lm_head.weight": weight}, {}, is_tied=True)
        >>> list(table), left_out
        (['model.embed_tokens.weight'], {'lm_head.weight': 'tied to model.embed_tokens.weight'})
    """
    found, left_out = dict(table), dict[str, str]()
    if is_tied is not False:
        left_out = {name: f"tied to {kept}" for name, kept in ties_among(table, ties, first=_EMBEDDINGS).items()}
    if is_tied and _HEAD in found and _HEAD not in left_out:
        for name in _EMBEDDINGS:
            if name in found:
                found = tie(_HEAD, name).on(found)
                left_out[_HEAD] = f"tied to {name}"
    for name in left_out:
        found.pop(name, None)
    return found, left_out


def tied_by_default(model_type: object) -> bool | None:
    """Whether a family ties its head where a configuration does not mention it; None for an unknown family."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return None if family is None else family.is_tied


def _is_of(each: Expression, sources: set[str]) -> bool:
    return any(source.name in sources for source, _ in each.reads(tuple((0, size) for size in each.shape)))

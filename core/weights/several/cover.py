"""`cover`: which source each tensor of a model comes from, decided from dtypes and shapes before anything is read. `Coverage`: the decision, which prints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import attrs

from trainfold.core.errors import InvalidState, WeightsRefused
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.printable import printable
from trainfold.core.weights.account import is_floating, is_rounded, not_supplied, other_dtype, other_shape, some_names
from trainfold.core.weights.several.load_spec import LoadSpec
from trainfold.core.weights.several.offer import Offer, offer_of
from trainfold.core.weights.several.source_text import described
from trainfold.core.weights.source import Wanted, source_name
from trainfold.core.weights.wrapped import ByScript

_USES_ALL: Final = ("used", "exact")
_FILLS_ALL: Final = ("filled", "exact")


@final
@attrs.frozen
class SourceUse:
    """What is taken from one source.

    Attributes:
        source: the source in words.
        fills: the tensors of the model that come from it, by their first names.
        names: all names under which it is asked for them.
        overridden: what it has and a later source has too, which counts.
        unused: what it has and the model has not, by the source's names. Nothing of it is read.
        lacking: what it is for and does not have.
        rounded: tensor -> the dtype that it is rounded from.
        is_listed: whether it lists what it has; otherwise it is taken at its word, and looked at when it comes.
    """

    source: str
    fills: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    rounded: Mapping[str, str] = attrs.field(factory=dict)
    is_listed: bool = True

    def __str__(self) -> str:
        parts = [f"{self.source}: {len(self.fills)} tensors"]
        if self.rounded:
            dtypes = ", ".join(sorted(set(self.rounded.values())))
            parts.append(f"{len(self.rounded)} of them rounded from {dtypes}")
        if self.overridden:
            parts.append(f"overridden: {some_names(self.overridden)}")
        if self.unused:
            parts.append(f"not used, as the model does not have them: {some_names(self.unused)}")
        if not self.is_listed:
            parts.append("not listed, so looked at when it comes")
        return "; ".join(parts)


@final
@attrs.frozen
class Coverage:
    """Which source each tensor of a model comes from. Prints as a list, one line a source.

    Attributes:
        uses: what is taken from each source, in their order.
        by_script: tensors that keep the values of the script, by their first names.
        problems: every reason why the weights cannot be taken so, all at once.
        overlaps: those among them that are about a tensor that two sources have.
    """

    uses: tuple[SourceUse, ...]
    by_script: tuple[str, ...] = ()
    problems: tuple[InvalidState, ...] = ()
    overlaps: tuple[InvalidState, ...] = ()

    @property
    def sources(self) -> dict[str, str]:
        """Tensor, by its first name -> the source that it comes from, in words."""
        return {name: use.source for use in self.uses for name in use.fills}

    def check(self) -> None:
        """Raise if the weights cannot be taken so.

        Raises:
            InvalidState: with the reason; `WeightsRefused`, if there are several.
        """
        _raise(self.problems)

    def check_overlaps(self) -> None:
        """Raise if two sources have one tensor. The other problems may be about a part of a model, which has not all of it.

        Raises:
            InvalidState: as `check`.
        """
        _raise(self.overlaps)

    def __str__(self) -> str:
        lines = [printable(str(each)) for each in self.uses]
        return "\n".join([*lines, *(f"refused: {each}" for each in self.problems)])


def _raise(problems: Sequence[InvalidState]) -> None:
    if problems:
        raise problems[0] if len(problems) == 1 else WeightsRefused("weights", tuple(problems))


def cover(specs: Sequence[LoadSpec], wanted: Mapping[str, Wanted]) -> Coverage:
    """Decide which source each tensor comes from.

    Law: each tensor comes from one source, from the script, or is named as a problem; no two of these.

    Args:
        specs: the sources, in order.
        wanted: the tensors of the model, each under all of its names.

    Returns:
        The decision, with every problem.

    Examples:
        >>> class Has:
        ...     def __init__(self, *names):
        ...         self.names = names
        ...     def __repr__(self):
        ...         return f"Has{self.names}"
        ...     def specs(self):
        ...         return {name: LeafSpec("float32", (2,)) for name in self.names}
        ...     def supply(self, wanted):
        ...         return iter(())
        >>> model = {name: Wanted("float32", (2,), ((0, 2),)) for name in "abc"}
        >>> print(cover([LoadSpec(Has("a", "b")), LoadSpec(Has("b", "c"), overrides=True)], model))
        Has('a', 'b'): 1 tensors; overridden: b
        Has('b', 'c'): 2 tensors
        >>> print(cover([LoadSpec(Has("a")), LoadSpec(Has("a", "b"))], model))
        Has('a',): 1 tensors
        Has('a', 'b'): 1 tensors
        refused: weights['a']: expected one source, found Has('a',) and Has('a', 'b'); leave it out of one by LoadSpec(names=...), or declare the later one: LoadSpec(..., overrides=True)
        refused: weights: expected all 3 tensors from 2 sources, found nothing for c; supply these too; what is trained here and not there belongs to the checkpoints: weights=trainfold.weights.Frozen(source)
    """
    _check_listed(offers := [_offered(spec, wanted) for spec in specs], specs)
    labels = [described(spec.source) for spec in specs]
    owners, overridden, overlaps = _owners(specs, offers, wanted, labels)
    firsts = list(dict.fromkeys(_first(name, wanted) for name in wanted))
    rest = next((index for index, spec in enumerate(specs) if spec.is_rest), None)
    if rest is not None:
        owners = {**dict.fromkeys(firsts, rest), **owners}
    problems = [*overlaps, *(each for use in _forms(offers, owners, wanted, labels) for each in use)]
    uses = []
    for index, (spec, offer) in enumerate(zip(specs, offers, strict=True)):
        fills = tuple(name for name in firsts if owners.get(name) == index)
        names = tuple(name for name in offer.forms if owners[_first(name, wanted)] == index)
        use = SourceUse(
            labels[index],
            fills,
            names,
            tuple(overridden.get(index, ())),
            _unused(spec, offer),
            _lacking(spec, offer, wanted),
            _rounded(offer, names, wanted),
            offer.is_listed or isinstance(spec.source, ByScript),
        )
        if wanted and not spec.is_rest:
            problems += _strictness(spec, use, offer, firsts)
        uses.append(use)
    missing = [name for name in firsts if name not in owners]
    if missing and not (len(specs) == 1 and not offers[0].forms):
        problems.append(not_supplied(source_name(specs[0].source) if len(specs) == 1 else f"{len(specs)} sources", missing, len(firsts)))  # fmt: skip
    script = {index for index, spec in enumerate(specs) if isinstance(spec.source, ByScript)}
    by_script = tuple(name for name in firsts if owners.get(name) in script)
    return Coverage(tuple(uses), by_script, tuple(problems), tuple(overlaps))


def _offered(spec: LoadSpec, wanted: Mapping[str, Wanted]) -> Offer:
    if spec.is_rest:
        return Offer({})
    offer = offer_of(spec.source, wanted)
    return attrs.evolve(offer, forms={name: each for name, each in offer.forms.items() if spec.takes(name)})


def _check_listed(offers: Sequence[Offer], specs: Sequence[LoadSpec]) -> None:
    """Raise if one of several sources does not say what it has.

    Raises:
        InvalidState: naming it.
    """
    for offer, spec in zip(offers, specs, strict=True):
        if len(specs) > 1 and not offer.is_listed and spec.names is None:
            raise InvalidState(
                "weights", expected="sources that list what they have, beside others", found=described(spec.source),
                fix="say what it is for: LoadSpec(source, names=...); or give it specs(), which returns name -> dtype and shape")  # fmt: skip


def _owners(
    specs: Sequence[LoadSpec], offers: Sequence[Offer], wanted: Mapping[str, Wanted], labels: Sequence[str]
) -> tuple[dict[str, int], dict[int, list[str]], list[InvalidState]]:
    """First name -> the source that counts; source -> what later ones override of it; and undeclared overlaps."""
    owners: dict[str, int] = {}
    overridden: dict[int, list[str]] = {}
    overlaps = []
    for index, (spec, offer) in enumerate(zip(specs, offers, strict=True)):
        for first in dict.fromkeys(_first(name, wanted) for name in offer.forms):
            before = owners.get(first)
            if before is None or spec.overrides:
                owners[first] = index
            if before is not None and spec.overrides:
                overridden.setdefault(before, []).append(first)
            elif before is not None:
                overlaps.append(
                    InvalidState(
                        f"weights[{first!r}]", expected="one source", found=f"{labels[before]} and {labels[index]}",
                        fix="leave it out of one by LoadSpec(names=...), or declare the later one: LoadSpec(..., overrides=True)",
                    )
                )  # fmt: skip
    return owners, overridden, overlaps


def _forms(
    offers: Sequence[Offer], owners: Mapping[str, int], wanted: Mapping[str, Wanted], labels: Sequence[str]
) -> Iterable[list[InvalidState]]:
    """The tensors that have another shape or dtype where they come from."""
    for index, offer in enumerate(offers):
        for name, form in offer.forms.items():
            if form is not None and owners[_first(name, wanted)] == index:
                where = f"weights[{name!r}] from {labels[index]}"
                yield _misfits(where, form, wanted[name], is_cast=offer.is_rounded)


def _misfits(where: str, form: LeafSpec, wanted: Wanted, *, is_cast: bool) -> list[InvalidState]:
    found = [] if form.shape == wanted.shape else [other_shape(where, wanted, form.shape)]
    rounds = is_cast and is_rounded(form.dtype) and is_rounded(wanted.dtype)
    fits = form.dtype == wanted.dtype or (not wanted.dtype and is_floating(form.dtype))
    return found if fits or rounds else [*found, other_dtype(where, wanted, form.dtype)]


def _rounded(offer: Offer, names: Iterable[str], wanted: Mapping[str, Wanted]) -> dict[str, str]:
    forms = {name: form for name in names if (form := offer.forms[name]) is not None}
    return {name: form.dtype for name, form in forms.items() if form.dtype != wanted[name].dtype}


def _unused(spec: LoadSpec, offer: Offer) -> tuple[str, ...]:
    return tuple(name for name in offer.others if spec.takes(name))


def _lacking(spec: LoadSpec, offer: Offer, wanted: Mapping[str, Wanted]) -> tuple[str, ...]:
    if spec.is_rest:
        return ()
    has = {_first(name, wanted) for name in offer.forms}
    firsts = dict.fromkeys(_first(name, wanted) for name in wanted if spec.takes(name))
    return tuple(name for name in firsts if name not in has)


def _strictness(spec: LoadSpec, use: SourceUse, offer: Offer, firsts: Sequence[str]) -> Iterable[InvalidState]:
    where = f"weights from {use.source}"
    if not offer.forms:
        yield InvalidState(
            where, expected=f"tensors of the model, such as {some_names(firsts)}", found=f"none among {len(use.unused)}: {some_names(use.unused)}" if use.unused else "none",
            fix="give its tensors the names of the model: trainfold.weights.Transformed(source, rules)")  # fmt: skip
        return
    if spec.strict in _USES_ALL and use.unused:
        yield InvalidState(
            where, expected="tensors of the model alone", found=some_names(use.unused),
            fix="rename them by Transformed(source, rules), leave them out by trainfold.transforms.drop or LoadSpec(names=...), or pass strict='any'")  # fmt: skip
    if spec.strict in _FILLS_ALL and use.lacking:
        yield InvalidState(
            where, expected="every tensor that it is for", found=f"nothing for {some_names(use.lacking)}",
            fix="narrow LoadSpec(names=...) down to what it has, or pass strict='used' or 'any'")  # fmt: skip


def _first(name: str, wanted: Mapping[str, Wanted]) -> str:
    return wanted[name].tied_to or name

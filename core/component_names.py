"""The names that components may have, and selections of them. Imports no torch: commands that read a run need it."""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from trainfold.core.checks import names_given, nearest
from trainfold.core.errors import InvalidArgument, RanksDisagree, UnknownComponent

BUILTIN_COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
_SHORT: Final = 3  # letters: prng, ring and rnd are names
_WORDS: Final = frozenset(
    {"mode", "modes", "modal", "schedule"}
)  # one letter from a built-in name, and names of their own
_TOGETHER: Final = (  # a component, one that it needs, and why
    ("scheduler", "optimizer", "the learning rate that a scheduler has set is in the optimizer's param groups"),
    ("optimizer", "scheduler", "the learning rate in its param groups belongs to the step that the scheduler counts"),
    ("dataset", "trainer", "a position belongs to a run that continues with its counters"),
)


def is_extra_name(name: object) -> bool:
    """Whether a user's own component may have this name.

    Examples:
        >>> is_extra_name("ema"), is_extra_name("model"), is_extra_name("a-b"), is_extra_name("é")
        (True, False, False, False)
    """
    return (
        isinstance(name, str)
        and name.isascii()
        and name.isidentifier()
        and name not in {*BUILTIN_COMPONENTS, "extra", "manifest"}
    )


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of components as every list of them is: built-in ones first, the others in the given order.

    Examples:
        >>> in_order(["ema", "rng", "model"])
        ['model', 'rng', 'ema']
    """
    given = list(names)
    builtin = [name for name in BUILTIN_COMPONENTS if name in given]
    return [*builtin, *(name for name in given if name not in builtin)]


def validate_components(
    names: Iterable[str] | None, *, declared: Collection[str] = (), where: str = "components"
) -> tuple[str, ...] | None:
    """Check a selection when it is configured, before any state exists.

    Args:
        names: component names, or None for all of them.
        declared: the names of the user's own components; built-in ones may be among them.
        where: the argument, for the message.

    Returns:
        The names, each once, in the order given; None for all.

    Raises:
        UnknownComponent: naming every unknown component, and the known ones.

    Examples:
        >>> validate_components(["model", "ema"], declared=["ema"])
        ('model', 'ema')
        >>> validate_components(["data_loader"])
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnknownComponent: components: expected names among ['model', 'optimizer', 'scheduler', \
'trainer', 'dataset', 'rng'], found ['data_loader']; correct the name, or declare the component under `extra`
    """
    chosen = names_given(names)
    if chosen is None:
        return None
    known = list(dict.fromkeys([*BUILTIN_COMPONENTS, *declared]))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UnknownComponent(
            where,
            expected=f"names among {known}",
            found=unknown,
            fix=f"{nearest(unknown, known)}correct the name, or declare the component under `extra`",
        )
    return chosen


def check_likely(names: Iterable[str] | None) -> tuple[str, ...] | None:
    """Check a selection before the user's own components are known.

    It refuses a name that no component can have, and a name that is nearly that of a built-in component. A user's own
    component may have a similar name if it differs by an index, or by a word after an underscore.

    Returns:
        The names, each once; None for all.

    Raises:
        UnknownComponent: naming the nearest component.

    Examples:
        >>> check_likely(["model", "model_2", "ema"])
        ('model', 'model_2', 'ema')
        >>> check_likely(["modell"])
        Traceback (most recent call last):
            ...
        trainfold.core.errors.UnknownComponent: components: expected names among ['model', 'optimizer', 'scheduler', \
'trainer', 'dataset', 'rng'] or of your own components, found ['modell']; did you mean 'model'? correct the name
    """
    chosen = names_given(names)
    odd = [
        name for name in chosen or () if name not in BUILTIN_COMPONENTS and (not is_extra_name(name) or _is_slip(name))
    ]
    if odd:
        raise UnknownComponent(
            "components",
            expected=f"names among {list(BUILTIN_COMPONENTS)} or of your own components",
            found=odd,
            fix=f"{nearest(odd, BUILTIN_COMPONENTS)}correct the name",
        )
    return chosen


def _is_slip(name: str) -> bool:
    """Whether a name is one slip of the keys from that of a built-in component, and no word of its own."""
    stem = name.partition("_")[0].rstrip("0123456789")
    is_one_of_many = name[:-1] in BUILTIN_COMPONENTS and name[-1].isupper()
    if stem in BUILTIN_COMPONENTS or is_one_of_many or name in _WORDS:
        return False
    return name.lower() in BUILTIN_COMPONENTS or any(_is_one_slip(name, known) for known in BUILTIN_COMPONENTS)


def _is_one_slip(name: str, known: str) -> bool:
    """Whether one letter is missing, added, wrong or swapped with the next; of a short name, to which many are similar, missing, twice or swapped."""
    if len(name) == len(known):
        wrong = [at for at, (one, other) in enumerate(zip(name, known, strict=True)) if one != other]
        if len(wrong) == 2:
            first, second = wrong
            return second == first + 1 and name[first] == known[second] and name[second] == known[first]
        return len(wrong) == 1 and len(known) > _SHORT
    long, short = sorted((name, known), key=len, reverse=True)
    extra = [at for at in range(len(long)) if long[:at] + long[at + 1 :] == short]
    return bool(extra) and (len(known) > _SHORT or long == known or len(extra) > 1)


def within(
    declared: tuple[str, ...] | None, asked: tuple[str, ...] | None, *, present: Collection[str], where: str
) -> tuple[str, ...] | None:
    """What is selected of a run that has declared its components itself.

    Args:
        declared: what the run has declared; None for all.
        asked: what a call asks for; None for all.
        present: the components that the run has.
        where: the argument, for the message.

    Returns:
        The names that are in both; None for all.

    Raises:
        InvalidArgument: if the call asks for a component that the run has, but has not declared.

    Examples:
        >>> within(("model", "trainer"), ("trainer", "dataset"), present=["model", "trainer", "rng"], where="components")
        ('trainer',)
    """
    if declared is None or asked is None:
        return asked if declared is None else declared
    beyond = [name for name in asked if name in present and name not in declared]
    if beyond:
        raise InvalidArgument(
            where,
            expected=f"components among those that the run was attached with, {list(declared)}",
            found=sorted(beyond),
            fix="name them in attach(..., components=[...]) too, or leave them out here",
        )
    return tuple(name for name in asked if name in declared)


def torn_pairs(
    names: Collection[str] | None, *, present: Collection[str], where: str = "components"
) -> tuple[InvalidArgument, ...]:
    """What a selection tears apart: of two components that mean something only together, it has one.

    Args:
        names: the selection; None for all.
        present: the components that there are. One that is not there is neither torn off nor missed.
        where: the argument, for the message.

    Examples:
        >>> [error.fix for error in torn_pairs(["dataset"], present=["trainer", "dataset"])]
        ['select trainer too, or leave dataset out: a position belongs to a run that continues with its counters']
        >>> torn_pairs(["optimizer"], present=["model", "optimizer"]), torn_pairs(["dataset"], present=["trainer"])
        ((), ())
    """
    return tuple(
        InvalidArgument(
            where,
            expected=f"{needed} with {name}",
            found=sorted(names),
            fix=f"select {needed} too, or leave {name} out: {reason}",
        )
        for name, needed, reason in _TOGETHER
        if names is not None and name in names and name in present and needed in present and needed not in names
    )


def nothing_selected(names: Collection[str] | None, *, present: Iterable[str]) -> str | None:
    """What to warn of a selection that has no component of those that there are; None if it has one.

    Args:
        names: the selection; None for all.
        present: the components that there are.

    Examples:
        >>> nothing_selected(["dataset"], present=["model", "trainer"])
        "components=['dataset'] selects none of model, trainer: a checkpoint holds the step alone, and a load loads nothing"
    """
    there = in_order(present)
    if names is None or any(name in names for name in there):
        return None
    return f"components={list(names)} selects none of {', '.join(there)}: a checkpoint holds the step alone, and a load loads nothing"


def selections_differ(where: str, selections: Sequence[Collection[str]]) -> RanksDisagree | None:
    """The error for ranks that have or select other components; None if all have the same.

    Args:
        where: for the message.
        selections: names by rank.

    Examples:
        >>> print(selections_differ("components", [["model", "rng"], ["model"]]).found)
        model, rng on rank 0, and model on rank 1
    """
    first = set(selections[0])
    odd = next((rank for rank, names in enumerate(selections) if set(names) != first), None)
    if odd is None:
        return None
    return RanksDisagree(
        where,
        expected="the same components on every rank",
        found=f"{', '.join(selections[0]) or 'none'} on rank 0, and {', '.join(selections[odd]) or 'none'} on rank {odd}",
        fix="pass the same components= to attach and to the manager, and attach the same objects, on every rank",
    )

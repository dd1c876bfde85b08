"""`described`: a source of weights in words. `pinned`: the same source, of the checkpoint that it has now. `sources_in`: what it is made of."""

import re
from collections.abc import Iterator
from typing import Any, Final

import attrs

from trainfold.core.weights.source import WeightSource

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def described(source: object, *, whole: bool = False) -> str:
    """A source in words, the same in each process: its ``repr``, without addresses in memory.

    Args:
        source: of weights, or a list of such.
        whole: whether a transform is written out; otherwise its rules are counted.

    Examples:
        >>> class Mine:
        ...     def supply(self, wanted):
        ...         return iter(())
        >>> described(Mine())
        'Mine()'
    """
    inner = [
        part
        for each in _inside(source).values()
        for part in (each if isinstance(each, tuple) else (each,))
        if isinstance(part, WeightSource) or hasattr(part, "source")
    ]
    if inner:
        parts = [described(each, whole=whole) for each in inner]
        rules = str(getattr(source, "transform", "")).splitlines()
        if rules:
            parts.append("; ".join(rules) if whole else f"{len(rules)} rule{'s' if len(rules) > 1 else ''}")
        text = ", ".join(parts)
        return f"{type(source).__name__}({text})" if isinstance(source, WeightSource) else text
    if type(source).__repr__ is object.__repr__:
        return f"{type(source).__qualname__.rpartition('.')[2]}()"
    return _ADDRESS.sub("", repr(source))


def why_ignored(initial: WeightSource) -> str:
    """Why a run that resumes does not take the weights with which it would begin.

    Examples:
        >>> class Mine:
        ...     def supply(self, wanted):
        ...         return iter(())
        >>> why_ignored(Mine())
        'Mine(): the run has checkpoints of its own'
    """
    return f"{described(initial)}: the run has checkpoints of its own"


def pinned(source: Any) -> Any:
    """The same source, of the checkpoint that it has now, however often it is asked: each source in it that can change has a method ``pinned``.

    Args:
        source: of weights, or something that is made of them.
    """
    if hasattr(source, "pinned"):
        return source.pinned()
    found = {name: pinned(each) for name, each in _inside(source).items() if not isinstance(each, tuple)}
    found |= {name: tuple(map(pinned, each)) for name, each in _inside(source).items() if isinstance(each, tuple)}
    return attrs.evolve(source, **found) if found else source


def sources_in(source: Any) -> Iterator[Any]:
    """A source, and those that it is made of."""
    yield source
    for each in _inside(source).values():
        for inner in each if isinstance(each, tuple) else (each,):
            yield from sources_in(inner)


def _inside(source: Any) -> dict[str, Any]:
    """The sources that another one wraps, by the attribute that has them."""
    names = [field.name for field in attrs.fields(type(source))] if attrs.has(type(source)) else []
    return {name: getattr(source, name) for name in names if name in ("source", "sources")}

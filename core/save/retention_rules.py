"""The rules of a `Retention`: the last k, every n steps, the n best, those newer than an age, all. Each is a frozen value."""

import math
from collections.abc import Iterable
from typing import Any, Final, Protocol, final

import attrs

from trainfold.core.best.score import Direction


@final
@attrs.frozen
class Saved:
    """The facts about one complete checkpoint that rules use.

    Attributes:
        name: its directory.
        step: optimizer steps done.
        timeline: the timeline that it belongs to.
        score: its score; None if unknown.
        age_secs: how long ago it was committed; None if unknown.
        parts: the components that it has, if it was saved without some components of the run; None if it has all.
    """

    name: str
    step: int
    timeline: int = 0
    score: float | None = None
    age_secs: float | None = None
    parts: frozenset[str] | None = None


class Rule(Protocol):
    """A reason to keep checkpoints: any frozen object with these two methods, as in ``Retention((my_rule,)) | keep_last(3)``."""

    def kept(self, checkpoints: tuple[Saved, ...]) -> frozenset[str]:
        """The names to keep, of checkpoints sorted oldest first. Pure."""

    def __str__(self) -> str:
        """What the rule keeps, in a few words, such as ``the last 3``."""


@final
@attrs.frozen
class Last:
    """The newest ``k``."""

    k: int

    def kept(self, checkpoints: tuple[Saved, ...]) -> frozenset[str]:
        """See `Rule.kept`."""
        return frozenset(one.name for one in checkpoints[-self.k :])

    def __str__(self) -> str:
        return "the last one" if self.k == 1 else f"the last {self.k}"


@final
@attrs.frozen
class Every:
    """The first one at or after each multiple of ``n_steps``."""

    n_steps: int

    def kept(self, checkpoints: tuple[Saved, ...]) -> frozenset[str]:
        """See `Rule.kept`."""
        first: dict[int, str] = {}
        for one in checkpoints:
            first.setdefault(one.step // self.n_steps, one.name)
        return frozenset(name for multiple, name in first.items() if multiple > 0)

    def __str__(self) -> str:
        return f"every {self.n_steps} steps"


@final
@attrs.frozen
class Best:
    """The ``n`` best of those with a finite score; of equal scores the earlier step."""

    n: int
    direction: Direction

    def kept(self, checkpoints: tuple[Saved, ...]) -> frozenset[str]:
        """See `Rule.kept`."""
        sign = 1.0 if self.direction == "min" else -1.0
        scored = [
            (sign * one.score, place, one.name)
            for place, one in enumerate(checkpoints)
            if one.score is not None and math.isfinite(one.score)
        ]
        return frozenset(name for _, _, name in sorted(scored)[: self.n])

    def __str__(self) -> str:
        return "the best one" if self.n == 1 else f"the best {self.n}"


@final
@attrs.frozen
class Newer:
    """Those that are at most ``age_secs`` old, or of unknown age."""

    age_secs: float

    def kept(self, checkpoints: tuple[Saved, ...]) -> frozenset[str]:
        """See `Rule.kept`."""
        return frozenset(one.name for one in checkpoints if one.age_secs is None or not one.age_secs > self.age_secs)

    def __str__(self) -> str:
        return f"newer than {self.age_secs:g} s"


@final
@attrs.frozen
class All:
    """All of them."""

    def kept(self, checkpoints: tuple[Saved, ...]) -> frozenset[str]:
        """See `Rule.kept`."""
        return frozenset(one.name for one in checkpoints)

    def __str__(self) -> str:
        return "all"


_KINDS: Final[dict[str, type[Any]]] = {"last": Last, "every": Every, "best": Best, "newer": Newer, "all": All}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def rules_to_json(rules: Iterable[Rule]) -> list[list[Any]]:
    """Rules as JSON can hold them; a rule of a program's own is its text.

    Law: ``rules_from_json(rules_to_json(rules))`` are the rules of this module again, and the texts of the others.

    Examples:
        >>> rules_to_json([Last(3), Best(1, "min")])
        [['last', 3], ['best', 1, 'min']]
    """
    return [
        [_NAMES[type(rule)], *attrs.astuple(rule)] if type(rule) in _NAMES else ["own", str(rule)]  # type: ignore[arg-type]
        for rule in rules
    ]


def rules_from_json(rows: object) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """The rules that these rows describe, and the texts of a program's own rules, which cannot be asked here; other rows are left out."""
    rules: list[Rule] = []
    texts: list[str] = []
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list) and row and isinstance(row[0], str):
            if row[0] == "own" and len(row) == 2 and isinstance(row[1], str):
                texts.append(row[1])
            elif row[0] in _KINDS and _fits(row[0], row[1:]):
                rules.append(_KINDS[row[0]](*row[1:]))
    return tuple(rules), tuple(texts)


def _fits(name: str, values: list[Any]) -> bool:
    wanted = {"last": (int,), "every": (int,), "best": (int, str), "newer": (float,), "all": ()}[name]
    is_typed = len(values) == len(wanted) and all(
        type(value) is kind or (kind is float and type(value) is int)
        for value, kind in zip(values, wanted, strict=True)
    )
    least = 0 if name == "newer" else 1
    return (
        is_typed
        and all(isinstance(value, str) or least <= value < 2**1023 for value in values[:1])
        and values[1:] in ([], ["min"], ["max"])
    )

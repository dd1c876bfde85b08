"""Which checkpoints stay because others refer to their files, and in which order checkpoints may go. Derived from heads alone, never stored."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from trainfold.core.history.inventory import Inventory

_WHY: Final = "refers to its files"


def is_needed_alone(why: str) -> bool:
    """Whether a reason is that another checkpoint refers to this one, and nothing else.

    Examples:
        >>> is_needed_alone("step-00000120 refers to its files")
        True
    """
    return why.endswith(_WHY)


def references_in(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    """Each checkpoint that refers to files of others -> these."""
    return {entry.name: entry.refers for entry in inventory.entries if entry.refers}


def still_needed(
    doomed: Collection[str], staying: Iterable[str], refers: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Which of the checkpoints that would go are needed, and why: one that stays refers to them, or one that is needed itself does.

    Args:
        doomed: what would go.
        staying: what stays.
        refers: from `references_in`.

    Examples:
        >>> still_needed({"a", "b", "c"}, ["d"], {"d": ("b",), "b": ("a",)})
        {'b': 'd refers to its files', 'a': 'b refers to its files'}
    """
    found: dict[str, str] = {}
    open_names = [*staying]
    while open_names:
        name = open_names.pop()
        for target in refers.get(name, ()):
            if target in doomed and target not in found:
                found[target] = f"{name} {_WHY}"
                open_names.append(target)
    return found


def referrers_first(names: Collection[str], refers: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names, each before those that it refers to; otherwise in their order. So an interrupted deletion leaves no checkpoint without its files.

    Examples:
        >>> referrers_first(["a", "b", "c"], {"c": ("a",)})
        ('b', 'c', 'a')
    """
    left, found = [*names], list[str]()
    while left:
        targets = {target for name in left for target in refers.get(name, ()) if target != name}
        ready = [name for name in left if name not in targets] or left[:1]  # forged heads may refer to each other
        found += ready
        left = [name for name in left if name not in ready]
    return tuple(found)

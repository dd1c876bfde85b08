"""Labels of param groups in a contract: a group's alphabetically first parameter, so a changed group may get another label."""

from collections.abc import Mapping, Sequence

from trainfold.core.json_values import Json


def relabelled(
    contract: Mapping[str, Json], prefix: str, saved: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]
) -> tuple[dict[str, Json], frozenset[str]]:
    """Return a saved contract with the labels of the run, for groups that gained or lost parameters.

    Args:
        contract: key -> value.
        prefix: the prefix of the optimizer's keys, such as ``"optimizer."``.
        saved: the parameters of each saved group.
        wanted: the parameters of each group of the run.

    Returns:
        The contract, and the prefixes of keys whose group only one side has; those follow from the parameters.

    Examples:
        >>> relabelled({"optimizer.groups['b'].lr": 0.1}, "optimizer.", [["b"]], [["a", "b"], ["c"]])
        ({"optimizer.groups['a'].lr": 0.1}, frozenset({"optimizer.groups['c']."}))
    """
    if {frozenset(group) for group in saved} == {frozenset(group) for group in wanted}:
        return dict(contract), frozenset()
    home = {name: number for number, group in enumerate(saved) for name in group}
    found, alone = dict(contract), set[str]()
    taken = dict[int, str]()
    for group in filter(None, wanted):
        number = next((home[name] for name in group if name in home), None)
        if number is None or number in taken:
            alone.add(_prefix_of(prefix, group))
        else:
            taken[number] = _prefix_of(prefix, group)
    for number, group in enumerate(saved):
        old, new = _prefix_of(prefix, group), taken.get(number)
        if new is None:
            alone.add(old)
        elif new != old:
            for key in [key for key in contract if key.startswith(old)]:
                found[new + key.removeprefix(old)] = found.pop(key)
    return found, frozenset(alone)


def _prefix_of(prefix: str, group: Sequence[str]) -> str:
    return f"{prefix}groups[{min(group, default='')!r}]."

"""The groups of a saved optimizer, for a run whose optimizer has other parameters by policy."""

import attrs

from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import OptimizerState, ParamGroup


def regrouped(saved: OptimizerState, wanted: OptimizerState) -> OptimizerState:
    """The saved optimizer with the parameters of the run: new parameters start without slots, and removed ones are left out.

    A parameter that both have stays in its saved group, with the saved hyperparameters. A new parameter joins the saved group of the
    parameters that share its group in the run; without such parameters its own group is added.

    Examples:
        >>> def state(*groups):
        ...     return OptimizerState("k", Leaves(), tuple(ParamGroup({"lr": lr}, names) for lr, *names in groups))
        >>> found = regrouped(state((0.1, "a", "b")), state((0.5, "a", "b", "c"), (0.2, "d")))
        >>> [(group.hyper["lr"], *group.params) for group in found.groups]
        [(0.1, 'a', 'b', 'c'), (0.2, 'd')]
    """
    have = {name for group in saved.groups for name in group.params}
    want = {name for group in wanted.groups for name in group.params}
    if have == want:
        return saved
    joining: dict[int, list[str]] = {}
    brought: list[ParamGroup] = []
    for group in wanted.groups:
        new = [name for name in group.params if name not in have]
        home = next((n for n, each in enumerate(saved.groups) if set(each.params) & set(group.params)), None)
        if new and home is None:
            brought.append(group)
        elif new and home is not None:
            joining.setdefault(home, []).extend(new)
    kept = [
        attrs.evolve(group, params=(*(name for name in group.params if name in want), *joining.get(number, ())))
        for number, group in enumerate(saved.groups)
    ]
    masters = saved.masters
    return attrs.evolve(
        saved,
        groups=(*(group for group in kept if group.params), *brought),
        slots=Leaves({name: slots for name, slots in saved.slots.items() if name in want}),
        masters=None if masters is None else Leaves({name: each for name, each in masters.items() if name in want}),
        with_grad=tuple(name for name in saved.with_grad if name in want),
    )

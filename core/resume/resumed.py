"""What a resumed state takes from the checkpoint, and what it keeps of the run: leaves, groups, hyperparameters, contract and origin."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
import torch

from trainfold.core.format.structure.ownership import seed_of_streams
from trainfold.core.format.structure.places import Leaf
from trainfold.core.optim.slot_layout import beside_params
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.state.contract import noted_settings
from trainfold.core.state.contract_kinds import BASE_RATES, SCHEDULED, run_contract
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.notes import RATES, notes_of, settings_of_later, without_notes
from trainfold.core.state.parent_checkpoint import ParentCheckpoint
from trainfold.core.state.state import OptimizerState, Origin, OwnOptimizerState, ParamGroup, TrainState


def leaf_sources(action: ComponentAction, saved: Mapping[str, Leaf], wanted: Iterable[str]) -> dict[str, Leaf | None]:
    """Where each leaf of a loaded component comes from: its saved leaf, or None if the run keeps its own value.

    Args:
        action: of the plan.
        saved: leaf path -> the saved leaf.
        wanted: the leaf paths of the run's component.

    Examples:
        >>> step = Leaf("t.step", None, 7)
        >>> found = leaf_sources(ComponentAction("t", "load", kept=("t.lr",)), {"t.step": step, "t.lr": step}, ["t.step", "t.lr", "t.new"])
        >>> found["t.step"].value, found["t.lr"], found["t.new"]
        (7, None, None)
    """
    kept = frozenset(action.kept)
    return {path: None if path in kept else saved.get(path) for path in wanted}


def resumed_origin(plan: ResumePlan, mine: Origin) -> Origin:
    """The origin of the resumed state: it descends from the checkpoint if it continues its counts.

    Args:
        plan: the resume.
        mine: the origin of the state that resumes.
    """
    head = plan.manifest.head
    continues = any(each.name == "trainer" and each.verb not in ("keep", "reset") for each in plan.actions)
    runs = {head.run_id: ParentCheckpoint(head.timeline, head.step, head.forks)} if continues else {}
    adapts = frozenset(drift.where for drift in plan.drifts if drift.adapts_a_scheduler)
    return Origin({**mine.runs, **runs}, adapts, outside=mine.outside)


def resumed_contract(plan: ResumePlan, like: TrainState, optimizer: Any) -> dict[str, Any]:
    """The contract of the resumed state. Of a key that several name, the later of these wins.

    They are: the checkpoint's settings of objects that the run has not attached yet; what the run records of itself; the settings of its
    optimizer, if the checkpoint's groups have others; the first learning rates that the checkpoint lists; what the plan says the next step
    must fit; and the notes of the checkpoint.

    Args:
        plan: the resume.
        like: the state that resumes.
        optimizer: the optimizer component of the resumed state; None without one.
    """
    saved = plan.manifest.contract
    return {
        **settings_of_later(saved, like.contract),
        **without_notes(run_contract(like.contract)),
        **noted_settings(like, optimizer),
        **{key: value for key, value in saved.items() if key == RATES},
        **plan.contract,
        **notes_of(saved),
    }


def resumed_optimizer(  # noqa: PLR0913 - keywords
    saved: Any,
    wanted: Any,
    params: Mapping[str, torch.Tensor] | None,
    kept: Collection[str],
    *,
    prefix: str = "optimizer",
    is_stage: bool = False,
) -> Any:
    """The saved state of an optimizer, and of the optimizers inside of it, for the parameters of this run; anything else unchanged.

    Args:
        saved: the component as it was saved.
        wanted: the component of the run.
        params: the parameters of the run, beside which the slots are placed; None if it has no model.
        kept: the keys of the contract whose values the run keeps, such as ``optimizer.groups['w'].lr``.
        prefix: what the keys of this optimizer begin with.
        is_stage: whether it has some of the saved parameters only, with as many groups; the others are of other stages.
    """
    if isinstance(saved, OwnOptimizerState):
        theirs = wanted.held if isinstance(wanted, OwnOptimizerState) else {}
        return attrs.evolve(
            saved,
            base=resumed_optimizer(saved.base, wanted, params, kept, prefix=prefix, is_stage=is_stage),
            held={
                name: resumed_optimizer(
                    each, theirs.get(name), params, kept, prefix=f"{prefix}.held[{name!r}]", is_stage=is_stage
                )
                for name, each in saved.held.items()
            },
        )
    if not isinstance(saved, OptimizerState):
        return saved
    target = wanted.base if isinstance(wanted, OwnOptimizerState) else wanted
    if is_stage and isinstance(target, OptimizerState):
        saved = _of_stage(with_kept_hyper(saved, target, kept, prefix=prefix), target)
        return saved if params is None else beside_params(saved, params)
    placed = saved if params is None else beside_params(saved, params)
    if not isinstance(target, OptimizerState):
        return placed
    return with_kept_hyper(regrouped(placed, target), target, kept, prefix=prefix)


def with_kept_hyper(
    saved: OptimizerState, wanted: OptimizerState, kept: Collection[str], *, prefix: str = "optimizer"
) -> OptimizerState:
    """The saved state with the run's value of each hyperparameter that the policy keeps, and the saved value of all others.

    A kept hyperparameter that the script has removed, such as the base rate of a removed scheduler, is dropped.

    Args:
        saved: the optimizer of the checkpoint.
        wanted: the optimizer of the run.
        kept: keys of the contract.
        prefix: what the keys of this optimizer begin with.

    Examples:
        >>> def state(**hyper):
        ...     return OptimizerState("k", Leaves(), (ParamGroup(hyper, ("w",)),))
        >>> kept = ["optimizer.groups['w'].lr", "optimizer.groups['w'].initial_lr"]
        >>> dict(with_kept_hyper(state(lr=0.1, initial_lr=0.1, eps=1), state(lr=0.5, eps=2), kept).groups[0].hyper)
        {'lr': 0.5, 'eps': 1}
    """
    if not kept:
        return saved
    by_fqn = {fqn: group for group in wanted.groups for fqn in group.params}

    def fix(group: ParamGroup) -> ParamGroup:
        label = min(group.params, default="")
        ours = by_fqn.get(label) or next((by_fqn[fqn] for fqn in group.params if fqn in by_fqn), None)
        if ours is None:
            return group

        def is_kept(name: str) -> bool:
            return f"{prefix}.groups[{label!r}].{name}" in kept

        theirs = {name: value for name, value in group.hyper.items() if name in ours.hyper or not is_kept(name)}
        return attrs.evolve(
            group, hyper={**theirs, **{name: value for name, value in ours.hyper.items() if is_kept(name)}}
        )

    return attrs.evolve(saved, groups=tuple(fix(group) for group in saved.groups))


def with_rates_of(mine: Any, theirs: Any) -> Any:
    """An optimizer's state with the learning rates of another one, their bases, and the momentum if a cycle moves it.

    A group gets those of the group that has one of its parameters. The first beta alone is part of a cycle. Anything else is returned
    unchanged.

    Examples:
        >>> def state(**hyper):
        ...     return OptimizerState("k", Leaves(), (ParamGroup(hyper, ("w",)),))
        >>> mine, theirs = state(lr=0.1, betas=(0.9, 0.99)), state(lr=0.5, initial_lr=1.0, max_momentum=0.95, betas=(0.8, 0.5))
        >>> dict(with_rates_of(mine, theirs).groups[0].hyper)
        {'betas': (0.8, 0.99), 'lr': 0.5, 'initial_lr': 1.0, 'max_momentum': 0.95}
    """
    if isinstance(mine, OwnOptimizerState):
        held = theirs.held if isinstance(theirs, OwnOptimizerState) else {}
        return attrs.evolve(
            mine,
            base=with_rates_of(mine.base, theirs),
            held={name: with_rates_of(each, held.get(name)) for name, each in mine.held.items()},
        )
    other = theirs.base if isinstance(theirs, OwnOptimizerState) else theirs
    if not isinstance(mine, OptimizerState) or not isinstance(other, OptimizerState):
        return mine
    by_fqn = {fqn: group.hyper for group in other.groups for fqn in group.params}

    def at_rates(group: ParamGroup) -> ParamGroup:
        hyper = next((by_fqn[fqn] for fqn in group.params if fqn in by_fqn), None)
        return group if hyper is None else attrs.evolve(group, hyper=_moved(group.hyper, hyper))

    return attrs.evolve(mine, groups=tuple(map(at_rates, mine.groups)))


def _moved(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    rates = {"lr", *BASE_RATES}
    found = {key: value for key, value in mine.items() if key not in rates}
    found |= {key: value for key, value in theirs.items() if key in rates}
    for key in SCHEDULED["max_momentum"] if "max_momentum" in {*mine, *theirs} else ():
        if key in mine and key in theirs:
            found[key] = theirs[key] if key != "betas" else (theirs[key][0], *mine[key][1:])
    return found


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


def _of_stage(saved: OptimizerState, wanted: OptimizerState) -> OptimizerState:
    """The part of a saved optimizer that a stage has: every group, some without parameters; new parameters start without slots."""
    have = {name for group in saved.groups for name in group.params}
    mine = {name for group in wanted.groups for name in group.params}
    new = [[name for name in group.params if name not in have] for group in wanted.groups]
    new += [[]] * (len(saved.groups) - len(new))
    groups = tuple(
        attrs.evolve(group, params=(*(name for name in group.params if name in mine), *more))
        for group, more in zip(saved.groups, new, strict=False)
    )
    return attrs.evolve(
        saved,
        groups=groups,
        slots=Leaves({name: slots for name, slots in saved.slots.items() if name in mine}),
        masters=None if saved.masters is None else Leaves({n: each for n, each in saved.masters.items() if n in mine}),
        with_grad=tuple(name for name in saved.with_grad if name in mine),
    )


def seed_of_other_ranks(plan: ResumePlan) -> int | None:
    """The seed from which a run of other ranks, or of other shares of the data, derives its random streams; None if it takes the saved ones, or is given others."""
    saved = plan.manifest.component("rng")
    return seed_of_streams(saved.nodes[0]) if saved is not None and drift_of_streams(plan) is not None else None


def drift_of_streams(plan: ResumePlan) -> Drift | None:
    """The difference for which new random streams are derived; None if there is none."""
    return next((drift for drift in plan.drifts if drift.kind == "streams"), None)

"""What belongs together and is not loaded together: whose learning rate an optimizer gets, and a position without its counters.

The rate of a scheduler of torch lives in both: the groups of the optimizer have the present one and the base, and the scheduler continues from
these. A scheduler that is not loaded begins with the rates of the script. A scheduler that is loaded continues with those of the checkpoint.
"""

from collections.abc import Sequence
from typing import Final

import attrs

from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.ownership import is_opaque
from trainfold.core.format.structure.places import places
from trainfold.core.format.structure.united_contract import group_params_of
from trainfold.core.json_values import Json
from trainfold.core.problem import Problem
from trainfold.core.resume.compare import OPTIMIZER, Findings, node_class
from trainfold.core.resume.request import Target
from trainfold.core.resume.resume_plan import NOT_ASKED_FOR, ComponentAction, Rates
from trainfold.core.state.contract_kinds import BASE_RATES

_OWN: Final = "trainfold.OwnOptimizerState"
_RATES: Final = tuple(f".hyper[{name!r}]" for name in ("lr", *BASE_RATES))
_BOTH: Final = 'reset both: reset={"optimizer": "why", "scheduler": "why"}'
_NOTES: Final[dict[Rates, str]] = {
    "checkpoint": "at the learning rate of its scheduler, which is loaded",
    "script": "at the learning rate of the script, as its scheduler, which is not loaded",
}


def with_rates(
    actions: Sequence[ComponentAction], manifest: Manifest, target: Target, findings: Findings
) -> tuple[ComponentAction, ...]:
    """The actions, with whose rates the optimizer gets; a problem is noted if the checkpoint does not have them.

    A schedule that is a function of the step sets every rate itself, so only a scheduler with a state of its own counts.

    Args:
        actions: of the plan.
        manifest: of the checkpoint.
        target: the run that resumes.
        findings: where problems are noted.
    """
    verbs = {action.name: action.verb for action in actions}
    mine, scheduler = (target.components.get(name) for name in ("optimizer", "scheduler"))
    if mine is None or scheduler is None or not _is_of_an_optimizer(mine.node) or not _has_state(scheduler.node):
        return tuple(actions)
    loads = [verbs[name] in ("load", "adopt") for name in ("optimizer", "scheduler")]
    if loads[0] == loads[1]:
        return tuple(actions)
    rates: Rates = "script" if loads[0] else "checkpoint"
    if rates == "checkpoint":
        _check_saved_rates(mine.node, manifest, findings)
    return tuple(_at(action, rates) if action.name == "optimizer" else action for action in actions)


def check_counters(actions: Sequence[ComponentAction], findings: Findings) -> None:
    """Note a problem if a position in the data is loaded and the counters are not: with a selection it is refused too."""
    verbs = {action.name: action.verb for action in actions if action.note != NOT_ASKED_FOR}
    if verbs.get("trainer") in ("reset", "keep") and verbs.get("dataset") in ("load", "adopt"):
        findings.problems.append(
            Problem("SpecMismatch", "dataset", "the counters of its run, because a position belongs to a run that continues with them",
                    "counters that are not loaded", 'reset both: reset={"trainer": "why", "dataset": "why"}, or neither', 20)
        )  # fmt: skip


def _at(action: ComponentAction, rates: Rates) -> ComponentAction:
    note = f"{action.note}; {_NOTES[rates]}" if action.note else _NOTES[rates]
    return attrs.evolve(action, note=note, rates=rates)


def _check_saved_rates(mine: Json, manifest: Manifest, findings: Findings) -> None:
    """Note a problem if the groups of a run get no rates from the checkpoint."""
    saved = manifest.component("optimizer")
    node = None if saved is None else _base(saved.nodes[0])
    groups = group_params_of(node)
    known = {name for group in groups for name in group}
    new = [names[0] for names in group_params_of(_base(mine)) if names and known.isdisjoint(names)]
    if not groups:
        found = "no optimizer"
    elif new:
        found = f"no group with {', '.join(new)}"
    elif any(leaf.tensor is not None and leaf.path.endswith(_RATES) for leaf in places(node, "optimizer")):
        found = "tensors, which are read for a loaded optimizer alone"
    else:
        return
    findings.problems.append(
        Problem(
            "SpecMismatch", "optimizer.groups", "the rates at which the loaded scheduler continues", found, _BOTH, 20
        )
    )


def _is_of_an_optimizer(node: Json) -> bool:
    return node_class(_base(node)) == OPTIMIZER


def _base(node: Json) -> Json:
    """The structure of an optimizer, without what its class has beside it."""
    if not isinstance(node, dict) or node_class(node) != _OWN:
        return node
    fields = node.get("fields")
    return fields.get("base") if isinstance(fields, dict) else None


def _has_state(node: Json) -> bool:
    """Whether a structure of schedulers has one with a state of its own."""
    if is_opaque(node):
        return True
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return any(map(_has_state, inner))

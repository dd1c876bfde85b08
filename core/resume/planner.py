"""`plan_resume`: which checkpoint, which components, what happens to every leaf, or every reason why not (V01).

Nothing is loaded and nothing is touched here. The plan is a value: it prints, compares, and has the same digest on every
rank that sees the same things.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import attrs

from trainfold.core.checks import nearest
from trainfold.core.component_names import BUILTIN_COMPONENTS
from trainfold.core.errors import Problem, UnknownComponent
from trainfold.core.format.manifest import ComponentRecord, Manifest
from trainfold.core.format.structure.ownership import is_between_epochs, is_opaque
from trainfold.core.history.inventory import OLDER, Inventory, lineage
from trainfold.core.json_values import Json
from trainfold.core.layout.world import World
from trainfold.core.resume.compare import compare_component
from trainfold.core.resume.compare_contract import compare_contract
from trainfold.core.resume.drift import Drift, verdict_of
from trainfold.core.resume.findings import Findings
from trainfold.core.resume.position_checks import with_positions_checked
from trainfold.core.resume.request import ResumeRequest, Target
from trainfold.core.resume.resume_plan import ComponentAction, Refusal, ResumePlan
from trainfold.core.state.contract import step_contract
from trainfold.core.state.contract_kinds import contract_kind

_ALWAYS_MEANT: Final = frozenset(
    {"model", "optimizer", "trainer"}
)  # a checkpoint without one of them is an export, or weightless
_OF_RANKS: Mapping[str, tuple[str, str]] = {
    "rng": ("streams", "random streams of "),
    "dataset": ("data_ranks", "the place in the data of "),
}


def next_to_examine(inventory: Inventory, request: ResumeRequest, wanted: Collection[str] = ()) -> str | None:
    """The checkpoint whose manifest must be read before a plan can be made, or None when enough is known.

    Args:
        inventory: the run, as far as it is known.
        request: what was asked for.
        wanted: the components of what wants to resume; a checkpoint that left some of them out is passed over for an older one.

    Examples:
        >>> from trainfold.core.history.inventory import Entry
        >>> from trainfold.core.format.manifest import Head
        >>> next_to_examine(Inventory("r", "r", (Entry("step-00000007", Head("r", 7)),)), ResumeRequest())
        'step-00000007'
    """
    if inventory.problem is not None:
        return None
    inventory = with_positions_checked(inventory, request)
    if request.step is not None:
        chosen = [entry for entry in inventory.entries if entry.head and entry.head.step == request.step]
        return next((entry.name for entry in chosen if entry.manifest is None and entry.problem is None), None)
    for entry in lineage(inventory):
        if entry.manifest is None:
            return entry.name
        if not left_out(entry.manifest, request, wanted):
            return None
    return None


def left_out(manifest: Manifest, request: ResumeRequest, wanted: Collection[str]) -> tuple[str, ...]:
    """The components that a resume would miss in a checkpoint that was saved without them on purpose (V06, T24).

    Those are the ones that its manifest lists as omitted, and the model, the optimizer and the counters, without which a checkpoint is an
    export. Any other component that is not there is one that the script has got since: no older checkpoint is better for it.

    Args:
        manifest: the checkpoint's.
        request: what was asked for; what it resets, does not ask for, or lets drift by policy, is not missed.
        wanted: the components of what wants to resume.
    """
    asked = [
        name
        for name in wanted
        if (request.components is None or name in request.components) and name not in request.reset
    ]
    return tuple(
        name
        for name in asked
        if (name in manifest.omitted or name in _ALWAYS_MEANT)
        and manifest.component(name) is None
        and verdict_of(_kind_of_absence(name, manifest), name, request.policy) == "refuse"
    )


def chosen_manifest(inventory: Inventory, request: ResumeRequest, wanted: Collection[str]) -> Manifest | None:
    """The manifest of the checkpoint to resume: the newest usable one that has what is wanted, or else the newest usable one.

    Args:
        inventory: the run, with the manifests that `next_to_examine` asked for.
        request: what was asked for, without a step.
        wanted: the components of what wants to resume.
    """
    found = [entry.manifest for entry in lineage(inventory) if entry.manifest is not None]
    return next((each for each in found if not left_out(each, request, wanted)), found[0] if found else None)


def plan_resume(inventory: Inventory, target: Target, request: ResumeRequest) -> ResumePlan | Refusal:
    """Decide how a run resumes, or list every reason why it cannot.

    Args:
        inventory: the run, with the manifests of the checkpoints that `next_to_examine` asked for.
        target: what wants to resume.
        request: what was asked for.

    Returns:
        A plan, or a refusal with all reasons at once.

    Raises:
        UnknownComponent: if the request names a component that neither the target nor the checkpoint has.

    Examples:
        >>> print(plan_resume(Inventory("runs/a", "r", ()), Target({}), ResumeRequest()))
          RunEmpty: runs/a: expected a complete checkpoint, found none; train from the start, or point at another run
    """
    inventory = with_positions_checked(inventory, request)
    manifest = _chosen(inventory, request, target)
    if not isinstance(manifest, Manifest):
        return Refusal(inventory.run, None, manifest)
    _check_names(manifest, target, request)
    findings = Findings(request.policy)
    dims = _dims(manifest)
    actions = tuple(_action(name, manifest, target, request, findings, dims=dims) for name in _names(manifest, target))
    compare_contract(
        manifest,
        target.contract,
        components=target.components,
        left_out={action.name for action in actions if action.verb in ("keep", "reset")},
        world=World(target.rank, target.world_size),
        versions=target.versions,
        findings=findings,
    )
    actions = tuple(_with_targets_choices(action, findings.drifts) for action in actions)
    checkpoint = f"step-{manifest.head.step:08d}"
    refused = tuple(
        sorted((drift for drift in findings.drifts if drift.verdict == "refuse"), key=lambda each: each.follows)
    )
    partial = () if request.step is not None else _partial(inventory, manifest, target, request)
    if refused or findings.problems:
        return Refusal(inventory.run, checkpoint, (*findings.problems, *refused, *partial))
    passed = () if request.step is not None else (*partial, *_passed_over(inventory, manifest))
    return ResumePlan(
        inventory.run,
        checkpoint,
        manifest,
        actions,
        tuple(findings.drifts),
        passed,
        _notes(inventory, manifest),
        _carried_contract(manifest, actions, request),
        _fresh_masters(actions),
    )


def _fresh_masters(actions: Sequence[ComponentAction]) -> bool:
    """Whether weights are loaded without the optimizer that trained them."""
    loaded = {action.name for action in actions if action.verb in ("load", "adopt")}
    return "model" in loaded and "optimizer" not in loaded


def _carried_contract(
    manifest: Manifest, actions: Sequence[ComponentAction], request: ResumeRequest
) -> dict[str, Json]:
    """What the next step is held to: all that the old one was, less what a policy lets drift; nothing for new counters."""
    resumed = any(action.name == "trainer" and action.verb in ("load", "adopt") for action in actions)
    kept = {
        key: value
        for key, value in manifest.contract.items()
        if verdict_of(contract_kind(key), key, request.policy) == "refuse"
    }
    return step_contract(kept) if resumed else {}


def _chosen(inventory: Inventory, request: ResumeRequest, target: Target) -> Manifest | tuple[Problem, ...]:
    if inventory.problem is not None:
        return (inventory.problem,)
    if request.step is not None:
        name = f"step-{request.step:08d}"
        entry = inventory.entry(name)
        if entry is not None and entry.problem is None and entry.manifest is not None:
            return entry.manifest
        if entry is not None and entry.problem is not None:
            return (_where_none_is_older(entry.problem, inventory, request.step),)
        saved = [each.head.step for each in inventory.entries if each.head is not None]
        return (Problem("CheckpointMissing", f"{inventory.run}/{name}", "a checkpoint of this step",
                         f"steps {saved[-8:]}" if saved else "no checkpoint", "name a saved step, or none for the newest", 11),)  # fmt: skip
    found = chosen_manifest(inventory, request, target.components)
    if found is not None:
        return found
    bad = tuple(entry.problem for entry in inventory.entries if entry.problem is not None and entry.head is not None)
    torn = tuple(entry.problem for entry in inventory.entries if entry.problem is not None and entry.head is None)
    empty = Problem("RunEmpty", inventory.run, "a complete checkpoint", "none",
                     "train from the start, or point at another run", 12)  # fmt: skip
    if inventory.lost is not None and not bad:
        empty = Problem("RunDamaged", inventory.run, f"a whole checkpoint: {inventory.lost}", "none",
                        "copy the run again, or start over on purpose: CheckpointManager(run, start_over=True)", 19)  # fmt: skip
    told = tuple(_where_none_is_older(each, inventory) for each in bad or torn)
    return told if bad else (empty, *told)


def _where_none_is_older(problem: Problem, inventory: Inventory, step: int | None = None) -> Problem:
    """A problem whose fix is an older checkpoint, where no usable one is there (before a step): then that is no fix."""
    usable = [each for each in inventory.entries if each.problem is None and each.head is not None]
    if not problem.fix.startswith(OLDER) or any(
        each.head is not None and (step is None or each.head.step < step) for each in usable
    ):
        return problem
    return attrs.evolve(
        problem, fix="no older checkpoint is whole: copy the run again from where it is, or begin another run"
    )


def _check_names(manifest: Manifest, target: Target, request: ResumeRequest) -> None:
    known = {*BUILTIN_COMPONENTS, *target.components, *(each.name for each in manifest.components)}
    unknown = [name for name in (*(request.components or ()), *request.reset) if name not in known]
    if unknown:
        raise UnknownComponent(
            "components",
            expected=f"names among {sorted(known)}",
            found=unknown,
            fix=f"{nearest(unknown, sorted(known))}correct the name",
        )


def _names(manifest: Manifest, target: Target) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*target.components, *(component.name for component in manifest.components)]))


def _action(  # noqa: PLR0913 (every one is named where it is called)
    name: str,
    manifest: Manifest,
    target: Target,
    request: ResumeRequest,
    findings: Findings,
    *,
    dims: Mapping[str, int],
) -> ComponentAction:
    wanted, saved = target.components.get(name), manifest.component(name)
    if name in request.reset:
        return ComponentAction(name, "reset", note=request.reset[name])
    if request.components is not None and name not in request.components:
        return ComponentAction(name, "keep", note="not asked for")
    if saved is None:
        findings.drift(_kind_of_absence(name, manifest), name, saved="nothing", wanted="the component")
        return ComponentAction(name, "keep", note="not saved")
    if _is_of_other_ranks(name, saved, manifest, target):
        kind, what = _OF_RANKS.get(name, ("per_rank", ""))
        wanted_ranks = f'{target.world_size} ranks; to begin anew, reset={{"{name}": "why"}}'
        findings.drift(kind, name, saved=f"{what}{manifest.world_size} ranks", wanted=wanted_ranks)
        return ComponentAction(name, "keep", note="saved for another world")
    part = target.rank if len(saved.nodes) > 1 else 0
    records = saved.tensors[part]
    verb, cast, kept = compare_component(name, saved, part, wanted, findings, dims=dims)
    used = [record for record in records if record.path not in findings.ignored]
    size = sum(shard.stop - shard.start for record in used for shard in record.shards)
    note = "the target has none" if wanted is None else ""
    return ComponentAction(name, verb, part, len(used), size, cast, kept, note)


def _is_of_other_ranks(name: str, saved: ComponentRecord, manifest: Manifest, target: Target) -> bool:
    """Whether a component is that of ranks which another world does not have: it is given to no other rank (H03, G06)."""
    if manifest.world_size == target.world_size:
        return False
    is_shared = len(saved.nodes) == 1
    if is_shared and name == "dataset" and is_between_epochs(saved.nodes[0]):
        return False  # every share of the epoch was read, and the next one is shared anew
    return not is_shared or (name in _OF_RANKS and is_opaque(saved.nodes[0]))


def _dims(manifest: Manifest) -> dict[str, int]:
    """FQN -> number of dimensions of each saved parameter."""
    model = manifest.component("model")
    prefix, suffix = "model.params['", "']"
    records = () if model is None else model.tensors[0]
    return {r.path[len(prefix) : -len(suffix)]: len(r.shape) for r in records if r.path.startswith(prefix)}


def _with_targets_choices(action: ComponentAction, drifts: Sequence[Drift]) -> ComponentAction:
    """Where the policy lets a difference of the contract pass, the value of the target is the one to use."""
    passed = [drift for drift in drifts if drift.verdict != "refuse"]
    if action.name == "optimizer":
        kept = [drift.where for drift in passed if contract_kind(drift.where) in {"hyperparameters", "scheduler"}]
    elif action.name == "dataset":
        kept = [drift.where for drift in passed if drift.kind == "dataset"]
    elif (
        action.name == "scheduler"
        and action.verb in ("load", "adopt")
        and any(drift.adapts_a_scheduler for drift in passed)
    ):
        return attrs.evolve(action, note="under the target's settings, by policy")
    elif action.name == "scheduler" and any(drift.kind in {"horizon", "schedule"} for drift in passed):
        return ComponentAction(action.name, "keep", note="the target's, by policy")
    else:
        kept = []
    return attrs.evolve(action, kept=(*action.kept, *kept)) if kept else action


def _kind_of_absence(name: str, manifest: Manifest) -> str:
    return "external_weights" if name == "model" and name in manifest.omitted else "missing_component"


def _partial(inventory: Inventory, manifest: Manifest, target: Target, request: ResumeRequest) -> tuple[Problem, ...]:
    """The newer ones that lack what is wanted, each with what it has."""
    newer = itertools.takewhile(lambda entry: entry.manifest is not manifest, lineage(inventory))
    return tuple(
        Problem(
            "ComponentsLeftOut",
            f"{inventory.run}/{entry.name}",
            f"a checkpoint with {', '.join(left_out(entry.manifest, request, target.components))}",
            f"one saved with {', '.join(component.name for component in entry.manifest.components)} alone",
            f"nothing, if it is an export; to load what it has, ask for it: step={entry.manifest.head.step}, components=[...]",
            20,
        )
        for entry in newer
        if entry.manifest is not None
    )


def _passed_over(inventory: Inventory, manifest: Manifest) -> tuple[Problem, ...]:
    """What might have been preferred: newer ones with a problem, and every one that has a manifest and no readable head."""
    chosen = (manifest.head.timeline, manifest.head.step)
    newer = f"step-{manifest.head.step:08d}"
    return tuple(
        entry.problem
        for entry in inventory.entries
        if entry.problem is not None
        and (
            (entry.head.timeline, entry.head.step) > chosen
            if entry.head is not None
            else entry.name > newer or entry.problem.error != "CheckpointTorn"
        )
    )


def _notes(inventory: Inventory, manifest: Manifest) -> tuple[str, ...]:
    left = sorted(
        entry.head.step for entry in inventory.entries
        if entry.head is not None and entry.head.timeline < manifest.head.timeline
        and entry.head.step > dict(manifest.head.forks).get(entry.head.timeline, -1)
    )  # fmt: skip
    return (f"steps {left} were left behind by a rewind (timeline {manifest.head.timeline})",) if left else ()

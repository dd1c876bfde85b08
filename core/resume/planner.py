"""`plan_resume`: decides on the checkpoint, the components and every leaf of a resume, or lists every reason against it.

Nothing is loaded and nothing is changed here. The plan is a value: it prints, compares, and has the same digest on every rank that sees
the same run.
"""

from collections.abc import Mapping, Sequence

import attrs

from trainfold.core.checks import nearest
from trainfold.core.component_names import BUILTIN_COMPONENTS, torn_pairs
from trainfold.core.errors import InvalidState, UnknownComponent
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.format.manifest import ComponentRecord, Manifest
from trainfold.core.format.structure.described import Described
from trainfold.core.format.structure.ownership import (
    are_alike_but_for_shares,
    continues_by_share,
    counts_on_rank_zero,
    is_between_epochs,
    is_opaque,
    is_over_all_ranks,
    is_per_rank,
    seed_of_streams,
    share_of,
    share_of_position,
    unread_by_share,
)
from trainfold.core.history.inventory import Inventory
from trainfold.core.json_values import Json
from trainfold.core.layout.world import World
from trainfold.core.problem import problem_of
from trainfold.core.resume.choose import (
    abandoned_with_components,
    choose,
    kind_of_absence,
    left_behind,
    newer_with_problems,
    newer_without_components,
)
from trainfold.core.resume.compare import Findings, compare_component
from trainfold.core.resume.compare_contract import compare_contract
from trainfold.core.resume.drift import Drift, verdict_of
from trainfold.core.resume.half_resets import check_counters, with_rates
from trainfold.core.resume.position_checks import with_positions_checked
from trainfold.core.resume.request import ResumeRequest, Target
from trainfold.core.resume.resume_plan import NOT_ASKED_FOR, ONE_FOR_ALL, ComponentAction, Refusal, ResumePlan
from trainfold.core.state.contract_kinds import contract_kind, prefix_of_optimizer, step_contract
from trainfold.core.state.names.tensor_names import param_name

# component that each rank may have of its own -> kind of drift in another world, and how a message names it
_OF_RANKS: Mapping[str, tuple[str, str]] = {
    "rng": ("per_rank", "random streams of "),
    "dataset": ("data_ranks", "the place in the data of "),
}
# kinds of keys of an optimizer, of which a run keeps its own values where they may differ
_OF_OPTIMIZERS = frozenset({"hyperparameters", "scheduler", "implementation"})
# what a message names for a loader that may have no sampler
_OF_OWN_STATE = (
    "; where a loader has a state of its own, as many shares continue, or any number from the end of an epoch; "
    "of a dataset with indexes trainfold.data.GlobalBatchSampler continues on any number of ranks, if the run is started with it"
)
# kind of drift -> what a component of other ranks begins with
_NOT_CONTINUED: Mapping[str, str] = {
    "streams": "new ones, derived from the seed, the step and the share of the data",
    "data_ranks": "saved for another number of ranks: its loader begins where the script has it, and not where the run was",
}


def plan_resume(inventory: Inventory, target: Target, request: ResumeRequest) -> ResumePlan | Refusal:
    """Decide how a run resumes, or list every reason why it cannot.

    Args:
        inventory: the run, with the manifests of the checkpoints that `next_to_examine` asked for.
        target: the run that resumes.
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
    manifest = choose(inventory, request, target.components)
    if not isinstance(manifest, Manifest):
        return Refusal(inventory.run, None, manifest)
    _check_names(manifest, target, request)
    chosen, renamed = manifest, ""
    if request.transform is not None:
        from trainfold.core.transform.renamed_manifest import renamed_manifest  # late: few resumes rename

        try:
            manifest, renaming = renamed_manifest(manifest, request.transform)
        except InvalidState as error:
            return Refusal(inventory.run, f"step-{manifest.head.step:08d}", (problem_of(error),))
        renamed = f"{renaming.changed} tensors of the model have other names here, by {request.transform}"
    elif _may_have_short_names(manifest, target):
        from trainfold.core.transform.renamed_manifest import with_kept_names  # late: few models have such names

        manifest, count = with_kept_names(manifest, target.components)
        renamed = f"{count} tensors have other names here: this checkpoint is from before a `module` of the user's kept its name" if count else ""  # fmt: skip
    findings = Findings(request.policy)
    there = {*target.components, *(each.name for each in manifest.components)}
    findings.problems.extend(map(problem_of, torn_pairs(request.components, present=there)))
    dims = _dims(manifest)
    actions = tuple(
        _action(name, manifest, target, request, findings, dims=dims) for name in _names(manifest, target, request)
    )
    actions = with_rates(actions, manifest, target, findings)
    check_counters(actions, findings)
    compare_contract(
        manifest,
        target.contract,
        components=target.components,
        left_out={action.name for action in actions if action.verb in ("keep", "reset")},
        rated={action.name for action in actions if action.rates == "checkpoint"},
        world=World(target.rank, target.world_size),
        versions=target.versions,
        findings=findings,
    )
    actions = tuple(_with_targets_choices(action, findings.drifts) for action in actions)
    refused = sorted((drift for drift in findings.drifts if drift.verdict == "refuse"), key=lambda each: each.follows)
    is_newest = request.step is None
    partial = newer_without_components(inventory, chosen, target, request) if is_newest else ()
    checkpoint = f"step-{manifest.head.step:08d}"
    if refused or findings.problems:
        abandoned = abandoned_with_components(inventory, chosen, target, request) if is_newest else ()
        return Refusal(inventory.run, checkpoint, (*findings.problems, *abandoned, *refused, *partial))
    return ResumePlan(
        inventory.run,
        checkpoint,
        manifest,
        actions,
        tuple(findings.drifts),
        (*partial, *newer_with_problems(inventory, chosen)) if is_newest else (),
        (*left_behind(inventory, chosen), *([renamed] if renamed else [])),
        _carried_contract(manifest, actions, request),
        _fresh_masters(actions),
    )


def _may_have_short_names(manifest: Manifest, target: Target) -> bool:
    """Whether the run has a name that the checkpoint has not and that could lead through a wrapper."""
    for saved in manifest.components:
        wanted = target.components.get(saved.name)
        odd = [] if wanted is None else [path for path in wanted.tensors if "module" in path or "_orig_mod" in path]
        if odd and not {*odd} <= {record.path for table in saved.tensors for record in table}:
            return True
    return False


def _fresh_masters(actions: Sequence[ComponentAction]) -> bool:
    """Whether weights are loaded without the optimizer that trained them."""
    loaded = {action.name for action in actions if action.verb in ("load", "adopt")}
    return "model" in loaded and "optimizer" not in loaded


def _carried_contract(
    manifest: Manifest, actions: Sequence[ComponentAction], request: ResumeRequest
) -> dict[str, Json]:
    """The contract of the next step: that of the checkpoint, without the keys that a policy lets drift; empty for new counters."""
    resumed = any(action.name == "trainer" and action.verb in ("load", "adopt") for action in actions)
    kept = {
        key: value
        for key, value in manifest.contract.items()
        if verdict_of(contract_kind(key), key, request.policy) == "refuse"
    }
    return step_contract(kept) if resumed else {}


def _check_names(manifest: Manifest, target: Target, request: ResumeRequest) -> None:
    known = {*BUILTIN_COMPONENTS, *target.components, *(each.name for each in manifest.components), *request.optional}
    unknown = [name for name in (*(request.components or ()), *request.reset) if name not in known]
    if unknown:
        raise UnknownComponent(
            "components",
            expected=f"names among {sorted(known)}",
            found=unknown,
            fix=f"{nearest(unknown, sorted(known))}correct the name",
        )


def _names(manifest: Manifest, target: Target, request: ResumeRequest) -> tuple[str, ...]:
    """All components; in one order on all ranks, although an optional one may exist on some of them only."""
    sure = [name for name in target.components if name not in request.optional]
    rest = sorted(request.optional & {*target.components, *request.reset})
    return tuple(dict.fromkeys([*sure, *rest, *(component.name for component in manifest.components)]))


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
        return ComponentAction(name, "keep", note=NOT_ASKED_FOR)
    if saved is None:
        kind = kind_of_absence(name, manifest)
        wants = "the component" + (
            "; to take it from elsewhere, attach(..., weights=source)" if kind == "external_weights" else ""
        )
        findings.drift(kind, name, saved="nothing", wanted=wants)
        return ComponentAction(name, "keep", note="not saved")
    own = _part_of(saved, wanted, target) if name != "dataset" else _part_of_position(saved, wanted, manifest, target)
    streams_follow_others = name == "rng" and _follow_other_shares(saved, wanted, manifest, target, request)
    is_of_others = own is None and (streams_follow_others or _is_of_other_ranks(name, saved, manifest, target))
    if is_of_others:
        kind, what = _OF_RANKS.get(name, ("per_rank", ""))
        if name == "rng" and _can_derive(saved, wanted):
            kind = "streams"
        sampler = "; trainfold.data.GlobalBatchSampler continues on any number of ranks" if name == "dataset" else ""
        if sampler and all(map(continues_by_share, saved.nodes)):
            sampler = _OF_OWN_STATE
        theirs, ours = some_ranks(manifest.world_size), some_ranks(target.world_size)
        if streams_follow_others and wanted is not None:
            before, now = _some_shares(saved.nodes[0]), _some_shares(wanted.node)
            theirs, ours = f"{before} on {theirs}", f"{now} on {ours}{', in another order' if before == now else ''}"
        elif name == "dataset" and (old := _shares(saved, manifest)[0]) and (new := _share(wanted, target)):
            theirs, ours = f"{old[1]} shares on {theirs}", f"{new[1]} shares on {ours}"
        again = f'{ours}{sampler}; to start it from scratch, reset={{"{name}": "why"}}'
        verdict = findings.drift(kind, name, saved=f"{what}{theirs}", wanted=again)
        own = _reassigned(saved, _share(wanted, target)) if name == "dataset" and verdict != "refuse" else None
    if own is None and is_of_others:
        note = _NOT_CONTINUED.get(kind, "saved for another number of ranks")
        return ComponentAction(name, "keep", note=note)
    part = (
        own
        if own is not None
        else (target.rank if len(saved.nodes) > 1 and manifest.world_size == target.world_size else 0)
    )
    records = saved.tensors[part]
    verb, cast, kept = compare_component(name, saved, part, wanted, findings, dims=dims)
    used = [record for record in records if record.path not in findings.ignored]
    size = sum(size_bytes(record.dtype, record.shape) for record in used)
    left = _left_unread(saved, _share(wanted, target)) if is_of_others else ""
    note = "the target has none" if wanted is None else ONE_FOR_ALL if _is_one_for_all(saved, wanted) else left
    return ComponentAction(name, verb, part, len(used), size, cast, kept, note)


def _part_of(saved: ComponentRecord, wanted: Described | None, target: Target) -> int | None:
    """The saved rank whose value the target takes, where the declarations of both say it; None if they do not.

    It is rank 0 for what is rank 0's now; else the first rank with the share of the data that the target reads, of as many shares, or that it
    had read if it has a value of its own now.
    """
    if wanted is None:
        return None
    if _is_one_for_all(saved, wanted):
        return 0
    shares = [share_of(node) for node in saved.nodes]
    mine = share_of(wanted.node)
    if mine is None and is_per_rank(wanted.node) and len(shares) == target.world_size:
        mine = shares[target.rank]
    return None if mine is None or mine not in shares else shares.index(mine)


def _is_one_for_all(saved: ComponentRecord, wanted: Described) -> bool:
    """Whether the target is declared to be rank 0's, and was saved for each rank or share."""
    return counts_on_rank_zero(wanted.node) and is_per_rank(saved.nodes[0])


def _part_of_position(
    saved: ComponentRecord, wanted: Described | None, manifest: Manifest, target: Target
) -> int | None:
    """The saved rank whose position in the data this rank takes: one that read the same share of as many, this rank if it did."""
    shares, mine = _shares(saved, manifest), _share(wanted, target)
    if mine is None or mine not in shares:
        return None
    return target.rank if target.rank < len(shares) and shares[target.rank] == mine else shares.index(mine)


def _reassigned(saved: ComponentRecord, mine: tuple[int, int] | None) -> int | None:
    """The saved rank from which a share continues on another number of shares: that of the same index, or the first for a share that joins.

    Only a loader with a state of its own can, or one that is read over all ranks: other positions depend on the number of shares.
    """
    known = [share_of_position(node) for node in saved.nodes]
    if mine is None or not all(known) or not all(map(continues_by_share, saved.nodes)):
        return None
    return next((i for i, share in enumerate(known) if share is not None and share[0] == mine[0]), 0)


def _left_unread(saved: ComponentRecord, mine: tuple[int, int] | None) -> str:
    """What the saved shares that this run does not have had not read of their epoch; empty if nothing."""
    left: dict[str, dict[int, None]] = {}
    for node in saved.nodes:
        share, unread = share_of_position(node), unread_by_share(node)
        if mine is not None and share is not None and share[0] >= mine[1] and unread:
            left.setdefault(unread, {})[share[0]] = None
    return "; ".join(
        f"share{'s' if len(shares) > 1 else ''} {', '.join(map(str, shares))} {'have' if len(shares) > 1 else 'has'} left, and what "
        f"{'they' if len(shares) > 1 else 'it'} had not read of {unread}, is not read"
        for unread, shares in left.items()
    )


def _shares(saved: ComponentRecord, manifest: Manifest) -> list[tuple[int, int] | None]:
    alone = (0, 1) if manifest.world_size == 1 else None
    return [share_of_position(node) or alone for node in saved.nodes]


def _share(wanted: Described | None, target: Target) -> tuple[int, int] | None:
    alone = (0, 1) if target.world_size == 1 else None
    return None if wanted is None else share_of_position(wanted.node) or alone


def _follow_other_shares(
    saved: ComponentRecord, wanted: Described | None, manifest: Manifest, target: Target, request: ResumeRequest
) -> bool:
    """Whether as many ranks read other shares of the data than those that saved, this rank or another one, so that no rank keeps its random streams.

    A rank sees the streams of its own index only, and says to the others what it has found. Where either side does not know its shares, nothing is known.
    """
    if manifest.world_size != target.world_size or wanted is None:
        return False
    theirs = share_of_position(saved.nodes[target.rank if len(saved.nodes) > 1 else 0])
    mine = share_of_position(wanted.node)
    return theirs is not None and mine is not None and (request.new_streams or theirs != mine)


def some_ranks(count: int) -> str:
    """The number of ranks in words.

    Examples:
        >>> some_ranks(1), some_ranks(2)
        ('1 rank', '2 ranks')
    """
    return f"{count} rank{'' if count == 1 else 's'}"


def _some_shares(node: Json) -> str:
    count = (share_of_position(node) or (0, 1))[1]
    return f"{count} share{'' if count == 1 else 's'} of the data"


def _can_derive(saved: ComponentRecord, wanted: Described | None) -> bool:
    """Whether new random streams can be derived from the saved ones, as the target has its own."""
    return seed_of_streams(saved.nodes[0]) is not None and (wanted is None or is_opaque(wanted.node))


def _is_of_other_ranks(name: str, saved: ComponentRecord, manifest: Manifest, target: Target) -> bool:
    """Whether a component belongs to ranks that this world does not have, so that it may be given to no other rank."""
    is_position = name == "dataset"
    share = _share(target.components.get(name), target) if is_position else None
    has_shares = share is not None and any(_shares(saved, manifest))  # and none of them is this one
    if manifest.world_size == target.world_size and not has_shares:
        return False
    if is_position and all(is_over_all_ranks(node) for node in saved.nodes):
        return False
    is_shared = len(saved.nodes) == 1 or (
        is_position and not any(saved.tensors) and are_alike_but_for_shares(saved.nodes)
    )
    if is_shared and name == "dataset" and is_between_epochs(saved.nodes[0]):
        return False  # every share of the epoch was read, and the next epoch is shared among the ranks of this world
    return not is_shared or (name in _OF_RANKS and is_opaque(saved.nodes[0])) or is_per_rank(saved.nodes[0])


def _dims(manifest: Manifest) -> dict[str, int]:
    """FQN -> number of dimensions of each saved parameter."""
    model = manifest.component("model")
    records = () if model is None else model.tensors[0]
    return {name: len(record.shape) for record in records if (name := param_name(record.path)) is not None}


def _with_targets_choices(action: ComponentAction, drifts: Sequence[Drift]) -> ComponentAction:
    """The action with the target's values for the differences of the contract that the policy lets pass."""
    passed = [drift for drift in drifts if drift.verdict != "refuse"]
    if action.name == "optimizer":
        kept = [drift.where for drift in passed if contract_kind(drift.where) in _OF_OPTIMIZERS]
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
        own = f"{prefix_of_optimizer(action.name)}."
        kept = [drift.where for drift in passed if drift.kind == "implementation" and drift.where.startswith(own)]
    return attrs.evolve(action, kept=(*action.kept, *kept)) if kept else action

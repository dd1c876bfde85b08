"""Which checkpoint a resume takes: the newest usable one with the wanted components, or that of a given step."""

import itertools
from collections.abc import Collection
from typing import Final

import attrs

from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import OLDER, Entry, Inventory, head_order, lineage
from trainfold.core.history.recognise import may_be_newest
from trainfold.core.problem import Problem
from trainfold.core.resume.drift import verdict_of
from trainfold.core.resume.position_checks import with_positions_checked
from trainfold.core.resume.request import ResumeRequest, Target

_ALWAYS_NEEDED: Final = frozenset({"model", "optimizer", "trainer"})  # without one of them a checkpoint is an export


def next_to_examine(inventory: Inventory, request: ResumeRequest, wanted: Collection[str] = ()) -> str | None:
    """The checkpoint whose manifest must be read before a plan can be made, or None if enough is known.

    Args:
        inventory: the run, as far as it is known.
        request: what was asked for.
        wanted: the components of the run that resumes. A checkpoint that omitted some of them is passed over for an older one.

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
        asked = [entry for entry in inventory.entries if entry.head and entry.head.step == request.step]
        return next((entry.name for entry in asked if entry.manifest is None and entry.problem is None), None)
    for entry in (*lineage(inventory), *_abandoned(inventory)):
        if entry.manifest is None:
            return entry.name
        if not left_out(entry.manifest, request, wanted):
            return None
    return None


def _abandoned(inventory: Inventory) -> list[Entry]:
    """The usable checkpoints that rewinds have left behind, the preferred one first. No resume takes one unless its step is asked for."""
    current = {entry.name for entry in lineage(inventory)}
    rest = [(entry.head, entry) for entry in inventory.entries if entry.head is not None and entry.is_candidate]
    rest.sort(key=lambda pair: head_order(pair[0]), reverse=True)
    return [entry for _, entry in rest if entry.name not in current]


def left_out(manifest: Manifest, request: ResumeRequest, wanted: Collection[str]) -> tuple[str, ...]:
    """The components that a resume needs but that a checkpoint omits on purpose.

    These are the components that its manifest lists as omitted, and the model, the optimizer and the counters, because a checkpoint
    without one of them is an export. The script has added any other absent component since, so that no older checkpoint has it either.

    Args:
        manifest: the manifest of the checkpoint.
        request: what was asked for. Components that it resets, leaves out, or lets drift by policy are not missed.
        wanted: the components of the run that resumes.
    """
    asked = [
        name
        for name in wanted
        if (request.components is None or name in request.components) and name not in request.reset
    ]
    return tuple(
        name
        for name in asked
        if (name in manifest.omitted or name in _ALWAYS_NEEDED)
        and manifest.component(name) is None
        and verdict_of(kind_of_absence(name, manifest), name, request.policy) == "refuse"
    )


def kind_of_absence(name: str, manifest: Manifest) -> str:
    """The kind of drift of a component that the checkpoint does not have."""
    return "external_weights" if name == "model" and name in manifest.omitted else "missing_component"


def chosen_manifest(inventory: Inventory, request: ResumeRequest, wanted: Collection[str]) -> Manifest | None:
    """The newest usable manifest with the wanted components; if there is none, the newest usable one.

    Args:
        inventory: the run, with the manifests that `next_to_examine` asked for.
        request: what was asked for, without a step.
        wanted: the components of the run that resumes.
    """
    found = [entry.manifest for entry in lineage(inventory) if entry.manifest is not None]
    return next((each for each in found if not left_out(each, request, wanted)), found[0] if found else None)


def choose(inventory: Inventory, request: ResumeRequest, wanted: Collection[str]) -> Manifest | tuple[Problem, ...]:
    """The manifest of the checkpoint to resume, or every reason why there is none.

    Args:
        inventory: the run, with the manifests that `next_to_examine` asked for.
        request: what was asked for.
        wanted: the components of the run that resumes.
    """
    if inventory.problem is not None:
        return (inventory.problem,)
    if request.step is not None:
        return _at_step(inventory, request.step)
    found = chosen_manifest(inventory, request, wanted)
    return _nothing_usable(inventory) if found is None else _unread(inventory, found, request, wanted) or found


def _unread(
    inventory: Inventory, found: Manifest, request: ResumeRequest, wanted: Collection[str]
) -> tuple[Problem, ...]:
    """The checkpoints that may be newer than a chosen one, and that could not be read now; not an export, which would not be chosen."""
    step = found.head.step
    then = f", so no other one is taken unless you name its step, for one start: step={step} (on the command line: --step {step})"
    return tuple(
        may_be_newest(entry.problem, then)
        for entry in inventory.maybe_newer(found.head)
        if entry.problem is not None and (entry.manifest is None or not left_out(entry.manifest, request, wanted))
    )


def _at_step(inventory: Inventory, step: int) -> Manifest | tuple[Problem, ...]:
    name = f"step-{step:08d}"
    entry = inventory.entry(name)
    if entry is not None and entry.problem is not None:
        return (_with_possible_fix(entry.problem, inventory, step),)
    if entry is not None and entry.manifest is not None:
        return entry.manifest
    saved = [each.head.step for each in inventory.entries if each.head is not None]
    return (Problem("CheckpointMissing", f"{inventory.run}/{name}", "a checkpoint of this step",
                     f"steps {saved[-8:]}" if saved else "no checkpoint", "name a saved step, or none for the newest", 11),)  # fmt: skip


def _nothing_usable(inventory: Inventory) -> tuple[Problem, ...]:
    """Why there is none. What cannot be read now comes first: it may be whole, and then nothing else has to be done."""
    found = sorted(inventory.entries, key=lambda entry: not entry.is_unreadable)
    bad = tuple(each.problem for each in found if each.problem is not None and (each.head or each.is_unreadable))
    torn = tuple(each.problem for each in found if each.problem is not None and each.head is None)
    empty = Problem("RunEmpty", inventory.run, "a complete checkpoint", "none",
                     "train from the start, or point at another run", 12)  # fmt: skip
    if inventory.lost is not None and not bad:
        empty = Problem("RunDamaged", inventory.run, f"a whole checkpoint: {inventory.lost}", "none",
                        "copy the run again, or start over on purpose: CheckpointManager(run, start_over=True)", 19)  # fmt: skip
    reasons = tuple(_with_possible_fix(each, inventory) for each in bad or torn)
    return reasons if bad else (empty, *reasons)


def _with_possible_fix(problem: Problem, inventory: Inventory, step: int | None = None) -> Problem:
    """The problem with another fix if its fix is an older checkpoint and no usable one exists (before a step)."""
    usable = [each for each in inventory.entries if each.problem is None and each.head is not None]
    if not problem.fix.startswith(OLDER) or any(
        each.head is not None and (step is None or each.head.step < step) for each in usable
    ):
        return problem
    return attrs.evolve(problem, fix="no older checkpoint is whole: copy the run again, or start another run")


def newer_without_components(
    inventory: Inventory, manifest: Manifest, target: Target, request: ResumeRequest
) -> tuple[Problem, ...]:
    """The newer checkpoints that were passed over because they lack wanted components."""
    newer = itertools.takewhile(lambda entry: entry.manifest is not manifest, lineage(inventory))
    return tuple(
        _without(
            f"{inventory.run}/{entry.name}",
            inventory.run,
            entry.manifest,
            left_out(entry.manifest, request, target.components),
        )
        for entry in newer
        if entry.manifest is not None
    )


def abandoned_with_components(
    inventory: Inventory, manifest: Manifest, target: Target, request: ResumeRequest
) -> tuple[Problem, ...]:
    """The newest checkpoint that a rewind has left behind and that has what no checkpoint of the current timeline has, with the call that takes it.

    It is not chosen: that a run went back may have been meant (ADR-0006).
    """
    missing = left_out(manifest, request, target.components)
    found = behind_with(inventory, request, target.components)
    if found is None or set(missing) <= request.optional:
        return ()
    run, head, step = inventory.run, manifest.head, found.head.step
    has = ", ".join(component.name for component in manifest.components)
    return (
        Problem(
            "ComponentsLeftOut",
            f"{run}/step-{head.step:08d}",
            f"a checkpoint with {', '.join(missing)}",
            f"one saved with {has} alone, and none with them before it in its timeline ({head.timeline}); "
            f"step {step} has them, and the run has left it behind",
            f"to continue from step {step}, name it: restore(live, step={step}), or trainfold.load(run, like=state, step={step}) "
            f"(on the command line: trainfold plan {run} --step {step}); for what step {head.step} has, components=[...]",
            20,
        ),
    )


def behind_with(inventory: Inventory, request: ResumeRequest, wanted: Collection[str]) -> Manifest | None:
    """The manifest of the newest checkpoint that a rewind has left behind and that has the wanted components; None if there is none.

    Args:
        inventory: the run, with the manifests that `next_to_examine` asked for.
        request: what was asked for.
        wanted: the components of the run that resumes.
    """
    manifests = [entry.manifest for entry in _abandoned(inventory)]
    return next((each for each in manifests if each is not None and not left_out(each, request, wanted)), None)


def _without(where: str, run: str, manifest: Manifest, missing: Collection[str]) -> Problem:
    """Why a checkpoint is passed over that lacks components; one without weights must list that."""
    has = ", ".join(component.name for component in manifest.components)
    if "model" in missing and "model" not in manifest.omitted:
        return Problem("CheckpointTorn", where, "weights, or a manifest that lists model among what was left out", f"neither: {has} alone",
                       f"{OLDER} of the run; save(..., components=[...]) records that weights are elsewhere", 13)  # fmt: skip
    return Problem(
        "ComponentsLeftOut",
        where,
        f"a checkpoint with {', '.join(missing)}",
        f"one saved with {has} alone",
        f"do nothing if it is an export; to load what it has, ask for it: step={manifest.head.step}, components=[...] "
        f"(on the command line: trainfold plan {run} --step {manifest.head.step})",
        20,
    )


def newer_with_problems(inventory: Inventory, manifest: Manifest) -> tuple[Problem, ...]:
    """The problems of newer checkpoints, and of every directory whose manifest has no readable head."""
    chosen = (manifest.head.timeline, manifest.head.step)
    name = f"step-{manifest.head.step:08d}"
    return tuple(
        entry.problem
        for entry in inventory.entries
        if entry.problem is not None
        and (
            (entry.head.timeline, entry.head.step) > chosen
            if entry.head is not None
            else entry.name > name or entry.problem.error != "CheckpointTorn"
        )
    )


def left_behind(inventory: Inventory, manifest: Manifest) -> tuple[str, ...]:
    """A note on the steps left behind by rewinds, if there are any."""
    left = sorted(
        entry.head.step for entry in inventory.entries
        if entry.head is not None and entry.head.timeline < manifest.head.timeline
        and entry.head.step > dict(manifest.head.forks).get(entry.head.timeline, -1)
    )  # fmt: skip
    return (f"steps {left} were left behind by the run (timeline {manifest.head.timeline})",) if left else ()

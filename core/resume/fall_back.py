"""Whether all ranks have decided the same, and what follows a load that failed: another list, an older checkpoint, or the error."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

import attrs

from trainfold.core.component_names import selections_differ
from trainfold.core.errors import (
    CheckpointError,
    CheckpointMissing,
    CheckpointTorn,
    RankFailed,
    RanksDisagree,
    ResumeRefused,
    TrainfoldError,
    rank_failed,
)
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import LoadOutcome, outcome_of, worst_outcome
from trainfold.core.problem import Problem, problem_of, worst_problem
from trainfold.core.resume.drift import Drift
from trainfold.core.resume.request import ResumeRequest
from trainfold.core.resume.resume_plan import NOT_ASKED_FOR, Refusal, ResumePlan

RELISTINGS: Final = 5  # another process that saves or deletes all the time must not hold a resume for ever
_GONE: Final = (CheckpointMissing.__name__, CheckpointTorn.__name__)
_RESTORES: Final = " restores "  # between the digest of a plan for some components and their names


@final
@attrs.frozen
class Decided:
    """What one rank has decided, for the comparison with the other ranks.

    Attributes:
        digest: equal on ranks that decide the same.
        checkpoint: the checkpoint that the decision is about; None if there is none.
        refused: the reasons of a refusal of that checkpoint; empty for a plan, and if no checkpoint was found.
        owing: the optional components that all reasons are about, each with the first reason; empty if there is another reason.
        new_streams: whether the saved random streams are not those of this rank.
    """

    digest: str
    checkpoint: str | None
    refused: str = ""
    owing: Mapping[str, str] = attrs.field(factory=dict)
    new_streams: bool = False

    @property
    def restores(self) -> tuple[str, ...]:
        """The components that the plan takes from the checkpoint, if not all were asked for."""
        names = self.digest.partition(_RESTORES)[2]
        return tuple(names.split(", ")) if names else ("all",)


def decided(outcome: ResumePlan | Refusal, optional: Collection[str] = ()) -> Decided:
    """What a rank reports of its plan or refusal.

    Args:
        outcome: the plan or refusal.
        optional: components that the run can do without.
    """
    drifts = outcome.drifts if isinstance(outcome, ResumePlan) else outcome.reasons
    new_streams = any(isinstance(each, Drift) and each.kind == "streams" for each in drifts)
    if isinstance(outcome, ResumePlan):
        is_part = any(each.note == NOT_ASKED_FOR for each in outcome.actions)
        restores = tuple(each.name for each in outcome.actions if is_part and each.verb in ("load", "adopt"))
        # no field of its own: rank 0 reads these bytes of every rank
        digest = outcome.digest() + (_RESTORES + ", ".join(restores) if restores else "")
        return Decided(digest, outcome.checkpoint, new_streams=new_streams)
    reasons = "; ".join(map(str, outcome.reasons)) if outcome.checkpoint else ""
    return Decided(f"refused:\n{outcome}", outcome.checkpoint, reasons, outcome.about_optional(optional), new_streams)


def without_optional(decisions: Sequence[Decided]) -> list[Mapping[str, str]]:
    """The optional components that all ranks leave out because some ranks would refuse the checkpoint otherwise: by rank, with the reasons.

    It is empty if that would not help.

    Args:
        decisions: by rank.

    Examples:
        >>> without_optional([Decided("d", "step-7"), Decided("e", "step-7", "log: ...", {"log": "cannot be restored"})])
        [{}, {'log': 'cannot be restored'}]
    """
    refusing = [each for each in decisions if each.refused]
    helps = all(each.owing for each in refusing) and len({each.checkpoint for each in decisions}) == 1
    return [each.owing for each in decisions] if refusing and helps else []


def disagreement(
    run: str, decisions: Sequence[Decided], mine: ResumePlan | Refusal
) -> RanksDisagree | RankFailed | ResumeRefused | None:
    """The error that a rank raises because the ranks decided differently, or None if all decided the same.

    Ranks that decided about different checkpoints, or that have different plans, see different files or have built different states. If some
    refuse the checkpoint that the others would load, they raise their reasons, and the others name the first of them.

    Args:
        run: its location.
        decisions: by rank.
        mine: the outcome of this rank.
    """
    odd = [rank for rank, each in enumerate(decisions) if each.digest != decisions[0].digest]
    if not odd:
        return None
    refusing = next((rank for rank, each in enumerate(decisions) if each.refused), None)
    if refusing is None or len({each.checkpoint for each in decisions}) > 1:
        differ = (
            None if refusing is not None else selections_differ("components", [each.restores for each in decisions])
        )
        if differ is not None:
            return differ
        return RanksDisagree(
            run,
            expected="the same plan on every rank",
            found=f"another one on ranks {odd} than on rank 0",
            fix="let every rank see the same files (no node-local or stale copies), and build the same state",
        )
    if isinstance(mine, Refusal):
        return ResumeRefused(run, mine)
    return rank_failed(
        refusing,
        expected="every rank to resume",
        found=f"reasons against {decisions[refusing].checkpoint} on it: {decisions[refusing].refused}",
        fix="do what the error of that rank says, on every rank",
    )


def lists_again(relistings: int, has_changed: bool) -> bool:  # noqa: FBT001 - of the run
    """Whether the run is listed again after a refusal: another process saved or deleted, so that there may be a usable checkpoint now.

    Args:
        relistings: how often this load has listed it again already.
        has_changed: whether the run holds something else than when it was listed.
    """
    return relistings < RELISTINGS and has_changed


def may_be_deleted(inventory: Inventory) -> bool:
    """Whether a checkpoint lacks files whose manifest was there when the run was listed: another process may have deleted it, after it saved a newer one.

    Args:
        inventory: what was found since.
    """
    return any(
        each.head is not None and each.problem is not None and each.problem.error in _GONE for each in inventory.entries
    )


def with_failed(listed: Inventory, before: Inventory) -> Inventory:
    """A run that was listed again, with what was proved of checkpoints that are still the same ones.

    A step that was deleted and saved again may have the same head, with other fingerprints. That files were gone is looked at again, which costs no read of data.

    Args:
        listed: the run as it is now.
        before: what was known of it.
    """
    for old in before.entries:
        now = listed.entry(old.name)
        if (
            old.head is not None
            and old.problem is not None
            and not old.is_unreadable
            and old.problem.error not in _GONE
            and now is not None
            and (now.head, now.summary) == (old.head, old.summary)
        ):
            listed = listed.with_entry(attrs.evolve(now, problem=old.problem))
    return listed


@final
@attrs.frozen
class Failure:
    """How the attempt of one rank failed, as the other ranks learn of it.

    Attributes:
        problem: the error.
        may_fall_back: whether an older checkpoint may be free of it.
        outcome: what the quarantine records.
    """

    problem: Problem
    may_fall_back: bool
    outcome: LoadOutcome


def failure_of(error: TrainfoldError) -> Failure:
    """What a rank reports of its error: only a problem of the checkpoint may be absent from an older one."""
    return Failure(problem_of(error), isinstance(error, CheckpointError), outcome_of(error))


def outcome_of_all(failures: Sequence[Failure]) -> LoadOutcome:
    """What the quarantine records of an attempt: the worst of all ranks."""
    return worst_outcome(each.outcome for each in failures)


def after_failure(
    inventory: Inventory, request: ResumeRequest, checkpoint: str, failures: Sequence[Failure]
) -> Inventory | None:
    """The inventory to plan with next, in which the checkpoint has the problem that was found, or None to raise the error.

    An older checkpoint is tried only if this step was not asked for, and if every rank that failed met a problem of the checkpoint. A failure
    of anything else, such as a state that does not fit, would repeat itself with the older one. If no rank has found it damaged, and some
    could not read it now, its problem in the inventory is that: the plan is refused then, because it is still the newest.

    Args:
        inventory: what the plan was made from.
        request: what was asked for.
        checkpoint: the one that did not load.
        failures: of the ranks that failed, at least one.
    """
    entry = inventory.entry(checkpoint)
    if request.step is not None or entry is None or not all(each.may_fall_back for each in failures):
        return None
    return inventory.with_entry(attrs.evolve(entry, problem=worst_problem([each.problem for each in failures])))

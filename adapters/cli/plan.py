"""`trainfold plan RUN`: shows what a resume would do, with the planner of a resume but without a model; and how often to save."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from trainfold.adapters.cli.inspect import NOT_SAVED
from trainfold.adapters.cli.loader_table import loader_places, loaders_table
from trainfold.adapters.cli.locate import open_run
from trainfold.adapters.cli.terminal.duration import duration_text
from trainfold.adapters.cli.terminal.output import Answer, Table, UsageError
from trainfold.backends.library_versions import library_versions
from trainfold.backends.runs.one_view import examined
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointError, InvalidArgument, ResumeRefused, RunEmpty, TrainfoldError
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.described import Described
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.printable import bytes_text
from trainfold.core.problem import Problem, error_from
from trainfold.core.resume.choose import behind_with, choose, chosen_manifest
from trainfold.core.resume.planner import plan_resume
from trainfold.core.resume.request import ResumeRequest, Target, resume_request
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.save.cadence import Cadence, advise_cadence

_CAVEAT = (
    "planned for a run built exactly as it was saved; your own model, data and world are compared "
    "when your program calls trainfold.plan(run, like=state)"
)


_OPTIONS = {
    "mtbf_secs": "--mtbf",
    "save_secs": "--save",
    "step_secs": "--step-time",
    "write_secs": "--write",
    "restart_secs": "--restart",
}
_NEEDED = ("mtbf_secs", "save_secs", "step_secs")


def plan_run(
    run: Path,
    *,
    step: int | None = None,
    components: Sequence[str] | None = None,
    costs: Mapping[str, float | None] | None = None,
    initial: Path | None = None,
) -> Answer:
    """Plan a resume from the manifests alone.

    Args:
        run: the directory.
        step: an explicit step, or None for the newest.
        components: what the program loads; None for all.
        costs: the arguments of `advise_cadence`, None for those that were not given.
        initial: where the weights are with which the run begins if it has no checkpoint.

    Returns:
        The plan, or the refusal with every reason; with the advice how often to save, if costs are given, also for a run that
        does not exist yet.

    Raises:
        CheckpointError: the matching subclass, if it is not a run and no costs are given.
        InvalidArgument: for a step below 0.
        UsageError: if some of the costs that the advice needs are missing, or a duration is invalid.
    """
    request = resume_request(
        step=step, components=components
    )  # first, because an invalid step is wrong whatever the run holds
    cadence = _advice(costs or {})
    if cadence is None:
        return _start_or_resume(run, request, initial)
    try:
        return _advised(_start_or_resume(run, request, initial), cadence)
    except CheckpointError as error:
        return _advised(Answer({}, error=error), cadence)


def _start_or_resume(run: Path, request: ResumeRequest, initial: Path | None) -> Answer:
    if initial is None:
        return _resume(run, request)
    found = None if request.step is None and not run.exists() else _resume(run, request)
    if found is None or (request.step is None and isinstance(found.error, RunEmpty)):
        from trainfold.adapters.cli.formats.initial import plan_initial  # late: it imports torch

        return plan_initial(run, initial)
    return found if found.error is not None else _ignoring(found, initial)


def _ignoring(answer: Answer, initial: Path) -> Answer:
    """The plan of a resume, with the weights that it does not take."""
    why = f"{initial}: the run has checkpoints of its own"
    first, *others = answer.tables
    data = {**answer.data, "ignored": [why]}
    return attrs.evolve(answer, data=data, tables=(attrs.evolve(first, rows=(*first.rows, ("ignored", why))), *others))


def _resume(run: Path, request: ResumeRequest) -> Answer:
    planned = planned_resume(*open_run(run), request)
    return _refused(planned) if isinstance(planned, Refusal) else _planned(planned)


def planned_resume(store: Store, inventory: Inventory, request: ResumeRequest) -> ResumePlan | Refusal:
    """The plan of a resume of a run built exactly as it was saved, with the libraries that are installed here; or why there is none."""
    known = quarantined(store) if request.step is None else {}  # a step that is asked for overrides the quarantine
    inventory = examined(store, with_quarantined(inventory, known), request)
    inventory, target = _same_run(store, inventory, request)
    return plan_resume(inventory, target, request)


def _advice(costs: Mapping[str, float | None]) -> Cadence | None:
    given = {name: value for name, value in costs.items() if value is not None}
    if not given:
        return None
    if missing := [_OPTIONS[name] for name in _NEEDED if name not in given]:
        raise UsageError("trainfold plan", expected=", ".join(_OPTIONS[name] for name in _NEEDED), found=f"no {', '.join(missing)}",
                         fix="give all three, as in --mtbf 12h --save 0.2s --step-time 500ms, or none")  # fmt: skip
    try:
        return advise_cadence(**given)
    except InvalidArgument as error:
        raise UsageError(f"trainfold plan {_OPTIONS[error.where]}", expected="a duration above 0", found=error.found,
                         fix="give one with its unit, such as 12h, 0.2s or 500ms") from None  # fmt: skip


def _advised(answer: Answer, cadence: Cadence) -> Answer:
    rows = tuple(
        (
            str(each.every_steps),
            duration_text(each.interval_secs),
            f"{each.lost_fraction:.3%}",
            "loses least" if each.every_steps == cadence.every_steps else "",
        )
        for each in cadence.alternatives
    )
    table = Table(f"Save every {cadence.every_steps} steps", ("every", "interval", "time lost", ""), rows)
    return attrs.evolve(answer, data={**answer.data, "cadence": attrs.asdict(cadence)}, tables=(*answer.tables, table))


def target_of(manifest: Manifest) -> Target:
    """The target of a run that wants exactly what a manifest has, with the libraries that are installed here."""
    components = {
        component.name: Described(component.nodes[0], {record.path: record.spec for record in component.tensors[0]})
        for component in manifest.components
    }
    return Target(
        components=components,
        contract=manifest.contract,
        world_size=manifest.world_size,
        versions=library_versions(),
    )


def _same_run(store: Store, inventory: Inventory, request: ResumeRequest) -> tuple[Inventory, Target]:
    """The target that fits the checkpoint that the planner chooses.

    The newest one may have only some of the components that the run saves. A program that resumes the run wants all of them.
    """
    newest = choose(inventory, request, ())
    if not isinstance(newest, Manifest):
        return inventory, Target({})
    if request.step is not None or not newest.omitted:
        return inventory, target_of(newest)
    wanted = {*newest.omitted, *(component.name for component in newest.components)}
    inventory = examined(store, inventory, request, wanted)
    whole = chosen_manifest(inventory, request, wanted) or newest
    return inventory, _with_left_behind(target_of(whole), inventory, request, wanted)


def _with_left_behind(target: Target, inventory: Inventory, request: ResumeRequest, wanted: set[str]) -> Target:
    """A target with the components, too, that only a checkpoint has that a rewind has left behind: the program that saved it wants them again."""
    left = behind_with(inventory, request, wanted)
    found = {} if left is None else {name: each for name, each in target_of(left).components.items() if name in wanted}
    return attrs.evolve(target, components={**found, **target.components})


def _planned(plan: ResumePlan) -> Answer:
    actions = tuple(
        (each.name, each.verb, str(each.tensors), bytes_text(each.size_bytes), each.note) for each in plan.actions
    )
    facts = [
        ("resumes from", plan.checkpoint),
        ("step", str(plan.step)),
        ("reads", bytes_text(plan.size_bytes)),
        *([("left out", ", ".join(plan.manifest.omitted))] if plan.manifest.omitted else []),
        *(("note", note) for note in (*plan.notes, _CAVEAT)),
    ]
    tables = [
        Table(f"A resume of {plan.run}", ("", ""), tuple(facts)),
        Table("Components", ("component", "what", "tensors", "size", "note"), actions),
    ]
    if plan.passed_over:
        rows = tuple((each.error, each.where, each.found, each.fix) for each in plan.passed_over)
        tables.append(Table("Passed over", ("why", "where", "found", "fix"), rows))
    if plan.drifts:
        found = tuple((each.verdict, each.kind, each.where, each.saved, each.wanted) for each in plan.drifts)
        tables.append(Table("Drifts", ("verdict", "kind", "where", "saved", "here"), found))
    loaders = loader_places(plan.manifest)
    if loaders:
        tables.append(loaders_table(loaders))
    if plan.unsaved:
        tables.append(Table(NOT_SAVED, ("attribute", "what it holds"), tuple(plan.unsaved.items())))
    data = {
        "run": plan.run,
        "resumes": True,
        "checkpoint": plan.checkpoint,
        "step": plan.step,
        "size_bytes": plan.size_bytes,
        "digest": plan.digest(),
        "actions": [attrs.asdict(action) for action in plan.actions],
        "passed_over": [attrs.asdict(problem) for problem in plan.passed_over],
        "drifts": [attrs.asdict(drift) for drift in plan.drifts],
        "loaders": [attrs.asdict(place) for place in loaders],
        "unsaved": plan.unsaved,
        "notes": [*plan.notes, _CAVEAT],
    }
    return Answer(data, tuple(tables))


def _refused(refusal: Refusal) -> Answer:
    error: TrainfoldError = ResumeRefused(refusal.run, refusal)
    first = refusal.reasons[0]
    if isinstance(first, Problem) and (
        refusal.finds_nothing or len(refusal.reasons) == 1 or first.error == "RunDamaged"
    ):
        error = error_from(first)
    data = {
        "run": refusal.run,
        "resumes": False,
        "checkpoint": refusal.checkpoint,
        "reasons": [attrs.asdict(reason) for reason in refusal.reasons],
    }
    return Answer(
        data, (Table(f"No resume of {refusal.run}", ("why",), tuple((str(r),) for r in refusal.reasons)),), error
    )

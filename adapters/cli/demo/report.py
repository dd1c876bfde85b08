"""The comparison of the two runs: decided from their records alone."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from trainfold.adapters.cli.demo.kill import Attempt, Kill
from trainfold.adapters.cli.demo.losses import Losses, losses_of
from trainfold.adapters.cli.terminal.output import Table, size_text
from trainfold.core.errors import TrainfoldError
from trainfold.core.rehearsal.entry import RecordedLine


class NotIdentical(TrainfoldError):
    """The run that was killed did not end with the bits of the one that was not."""

    exit_code = 40


class KillsMissing(TrainfoldError):
    """The run was killed or resumed less often than promised, or never killed during a save: too little was shown."""

    exit_code = 41


class EvaluationDiffers(TrainfoldError):
    """The same values gave other bits in batches of another size."""

    exit_code = 43


@final
@attrs.frozen
class RunRecord:
    """What is left of a run: its end, its losses.

    Attributes:
        steps: optimizer steps done.
        fingerprints: component -> digest of its final bits.
        evaluation: mean loss on the held-out text.
        losses: of each step.
        measured: the evaluation at several batch sizes, as `Measurement` has it; empty for a run that measures once.
    """

    steps: int
    fingerprints: dict[str, str]
    evaluation: float
    losses: Losses
    measured: dict[str, Any] = attrs.Factory(dict)


@final
@attrs.frozen
class Check:
    """One thing that must be the same in both runs."""

    name: str
    uninterrupted: str
    killed: str

    @property
    def same(self) -> bool:
        """Whether it is."""
        return self.uninterrupted == self.killed


@final
@attrs.frozen
class Comparison:
    """Two runs side by side.

    Attributes:
        checks: each thing compared.
        attempts: the processes of the killed run.
        wanted_kills: how many were promised.
        measured: the evaluation of the killed run at several batch sizes.
    """

    checks: tuple[Check, ...]
    attempts: tuple[Attempt, ...]
    wanted_kills: int
    measured: dict[str, Any]

    @property
    def identical(self) -> bool:
        """Whether everything compared is the same."""
        return all(check.same for check in self.checks)

    @property
    def error(self) -> TrainfoldError | None:
        """What the promise fails by, or None."""
        if not self.identical:
            differs = [check.name for check in self.checks if not check.same]
            return NotIdentical(
                "the killed run",
                expected="the bits of the run that was never killed",
                found=f"differences in {', '.join(differs)}",
                fix="`trainfold diff` on the two runs names the leaves; please report this as a defect",
            )
        kept = {size["kept"] for size in self.measured.get("sizes", {}).values()}
        if len(kept) > 1:
            return EvaluationDiffers(
                "the evaluation",
                expected="the same bits for the same values, whatever the batch size",
                found=", ".join(sorted(kept)),
                fix="please report this as a defect",
            )
        kills = [attempt.kill for attempt in self.attempts if attempt.kill is not None]
        in_save = sum(kill.during == "save" for kill in kills)
        resumes = sum(attempt.resumed_from is not None for attempt in self.attempts)
        if min(len(kills), resumes) < self.wanted_kills or not in_save:
            return KillsMissing(
                "the killed run",
                expected=f"{self.wanted_kills} kills or more, one of them during a save, and as many resumes from a checkpoint",
                found=f"{len(kills)} kills, {in_save} during a save, {resumes} resumes from a checkpoint",
                fix="run it again with more --steps: this machine was too fast or too slow for the moments chosen",
            )
        return None


def record_of(events: Sequence[RecordedLine]) -> RunRecord:
    """Make the record of a run that has ended from its events."""
    end = next(event for event in reversed(events) if event.kind == "done")
    return RunRecord(
        steps=end.step,
        fingerprints=dict(end.data["fingerprints"]),
        evaluation=float(end.data["evaluation"]),
        losses=losses_of(events),
        measured=dict(end.data.get("measured", {})),
    )


def compare(
    uninterrupted: RunRecord, killed: RunRecord, attempts: Sequence[Attempt], *, wanted_kills: int
) -> Comparison:
    """Put the runs side by side.

    Args:
        uninterrupted: the run that was left alone.
        killed: the other.
        attempts: the processes of the other.
        wanted_kills: how many of them should have been killed.

    Returns:
        The comparison; floats are compared by their bits.
    """
    names = {**uninterrupted.fingerprints, **killed.fingerprints}
    checks = [Check("steps", str(uninterrupted.steps), str(killed.steps))]
    checks += [
        Check(name, uninterrupted.fingerprints.get(name, "absent"), killed.fingerprints.get(name, "absent"))
        for name in names
    ]
    checks.append(Check("evaluation loss", _exact(uninterrupted.evaluation), _exact(killed.evaluation)))
    one, other = uninterrupted.losses.by_step, killed.losses.by_step
    equal = sum(step in other and loss.hex() == other[step].hex() for step, loss in one.items())
    checks.append(Check("losses of the steps", f"{len(one)}", f"{equal} the same" if equal != len(one) else f"{equal}"))
    again = killed.losses.replayed
    checks.append(Check("losses computed again", f"{again}", f"{again - len(killed.losses.contradictions)}"))
    return Comparison(tuple(checks), tuple(attempts), wanted_kills, killed.measured)


def tables(comparison: Comparison, facts: Sequence[tuple[str, str]]) -> tuple[Table, ...]:
    """The comparison for people: one table of what was done to the run and what came of it, and where things are."""
    kills = [attempt.kill for attempt in comparison.attempts if attempt.kill is not None]
    in_save = sum(kill.during == "save" for kill in kills)
    history = [("kills", "0", f"{len(kills)}, {in_save} of them during a save", "")]
    for number, attempt in enumerate(comparison.attempts, start=1):
        history.append((f"start {number}", "fresh" if number == 1 else "", attempt.resumed_from or "fresh", ""))
        history.append((f"end {number}", "by itself" if number == 1 else "", kill_text(attempt), ""))
        if attempt.kill is not None and attempt.kill.during == "save":
            history.append((f"left {number}", "", _left_text(attempt.kill), ""))
    steps, *others = (
        (check.name, check.uninterrupted, check.killed, "yes" if check.same else "NO") for check in comparison.checks
    )
    verdict = (f"identical: {'yes' if comparison.identical else 'NO'}", "", "", "")
    return (
        Table(
            "One run, twice", ("", "never killed", "killed and resumed", "same"), (steps, *history, *others, verdict)
        ),
        *([_evaluation_table(comparison.measured)] if comparison.measured else []),
        Table("", ("", ""), (*_kernels(comparison.measured), *facts)),
    )


def _kernels(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What no aggregation can decide: whether the model gives a sample the same value in any batch."""
    if not measured:
        return []
    small, *_, large = measured["sizes"]
    return [
        ("the model's kernels", f"round {measured['moved']} of {measured['values']} values otherwise"),
        ("", f"in batches of {small} than in batches of {large}"),
    ]


def _evaluation_table(measured: Mapping[str, Any]) -> Table:
    """The evaluation at each batch size: what is the same because it is exact, and what is not."""
    sizes = list(measured["sizes"].values())

    def row(name: str, values: Sequence[str]) -> tuple[str, ...]:
        return (name, *values, "yes" if len(set(values)) == 1 else "no")

    rows = [
        row("loss, of values kept", [size["kept"] for size in sizes]),
        row("  mean of batch means", [size["means"] for size in sizes]),
        row("  sums in float32", [size["float32"] for size in sizes]),
        *(row(f"{name}, computed anew", [size["results"][name] for size in sizes]) for name in sizes[0]["results"]),
    ]
    columns = ("", *(f"batches of {size}" for size in measured["sizes"]), "same")
    return Table("Its evaluation, at three batch sizes", columns, tuple(rows))


def as_json(comparison: Comparison, killed: RunRecord) -> dict[str, Any]:
    """The comparison as JSON can hold it."""
    return {
        "identical": comparison.identical,
        "kills": sum(attempt.kill is not None for attempt in comparison.attempts),
        "kills_during_a_save": sum(a.kill is not None and a.kill.during == "save" for a in comparison.attempts),
        "checks": [{**attrs.asdict(check), "same": check.same} for check in comparison.checks],
        "attempts": [attrs.asdict(attempt) for attempt in comparison.attempts],
        "contradicting_steps": list(killed.losses.contradictions),
        "evaluation": killed.measured,
    }


def kill_text(attempt: Attempt) -> str:
    """How a process ended, in words."""
    kill = attempt.kill
    if kill is None:
        return "by itself"
    if kill.during == "step":
        return f"SIGKILL in step {kill.step + 1}"
    return f"SIGKILL during the save of step {kill.step}"


def _left_text(kill: Kill) -> str:
    """What a kill during a save left in the run."""
    if kill.committed:
        return "a whole checkpoint, not yet acknowledged"
    files = "1 file" if len(kill.leftovers) == 1 else f"{len(kill.leftovers)} files"
    return f"torn: {size_text(sum(kill.leftovers.values()))} in {files}, no manifest"


def _exact(value: float) -> str:
    return f"{value:.6f} ({value.hex()})"

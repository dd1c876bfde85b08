"""Compares the demo's two runs, from their records alone."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs

from trainfold.adapters.cli.demo.kill import Attempt, Kill
from trainfold.adapters.cli.demo.losses import Losses, losses_of
from trainfold.adapters.cli.terminal.output import Table
from trainfold.core.errors import TrainfoldError
from trainfold.core.printable import bytes_text
from trainfold.core.rehearsal.entry import RecordedLine


class NotIdentical(TrainfoldError):
    """The killed run did not end with the bits of the uninterrupted one."""

    exit_code = 40


class KillsMissing(TrainfoldError):
    """The run was killed or resumed less often than promised, or never killed during a save."""

    exit_code = 41


class EvaluationDiffers(TrainfoldError):
    """The same values gave different bits in batches of another size."""

    exit_code = 43


@final
@attrs.frozen
class RunRecord:
    """What the record of a run says: its end and its losses.

    Attributes:
        steps: optimizer steps done.
        fingerprints: component -> digest of its final bits.
        evaluation: mean loss on the held-out text.
        losses: the loss of each step.
        measured: the evaluation at several batch sizes, as in `Measurement`; empty for a run that measures once.
    """

    steps: int
    fingerprints: dict[str, str]
    evaluation: float
    losses: Losses
    measured: dict[str, Any] = attrs.Factory(dict)


@final
@attrs.frozen
class Check:
    """A value that must be the same in both runs."""

    name: str
    uninterrupted: str
    killed: str

    @property
    def same(self) -> bool:
        """Whether it is the same."""
        return self.uninterrupted == self.killed


@final
@attrs.frozen
class Comparison:
    """Two runs side by side.

    Attributes:
        checks: each value compared.
        attempts: the processes of the killed run.
        wanted_kills: the number of kills that were promised.
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
        """Why the promise is broken, or None."""
        if not self.identical:
            differs = [check.name for check in self.checks if not check.same]
            return NotIdentical(
                "the killed run",
                expected="the bits of the run that was never killed",
                found=f"differences in {', '.join(differs)}",
                fix="run `trainfold diff` on both runs, which names the leaves, and report it as a defect",
            )
        kept = {size["kept"] for size in self.measured.get("sizes", {}).values()}
        if len(kept) > 1:
            return EvaluationDiffers(
                "the evaluation",
                expected="the same bits for the same values, whatever the batch size",
                found=", ".join(sorted(kept)),
                fix="report this as a defect",
            )
        kills = [attempt.kill for attempt in self.attempts if attempt.kill is not None]
        in_save = sum(kill.during == "save" for kill in kills)
        resumes = sum(attempt.resumed_from is not None for attempt in self.attempts)
        if min(len(kills), resumes) < self.wanted_kills or not in_save:
            return KillsMissing(
                "the killed run",
                expected=f"{self.wanted_kills} kills or more, one of them during a save, and as many resumes from a checkpoint",
                found=f"{len(kills)} kills, {in_save} during a save, {resumes} resumes from a checkpoint",
                fix="pass more --steps: this machine was too fast or too slow for the chosen moments",
            )
        return None


def record_of(events: Sequence[RecordedLine]) -> RunRecord:
    """The record of a completed run, from its events."""
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
    """Compare the two runs.

    Args:
        uninterrupted: the run that was not killed.
        killed: the run that was.
        attempts: the processes of the killed run.
        wanted_kills: how many of these processes should have been killed.

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
    """The comparison as tables: what was done to the run and how it ended, its evaluation, and where the files are."""
    kills = [attempt.kill for attempt in comparison.attempts if attempt.kill is not None]
    in_save = sum(kill.during == "save" for kill in kills)
    history = [("kills", "0", f"{len(kills)}, {in_save} of them during a save", "")]
    for number, attempt in enumerate(comparison.attempts, start=1):
        history.append((f"start {number}", "fresh" if number == 1 else "", attempt.resumed_from or "fresh", ""))
        history.append((f"end {number}", "completed" if number == 1 else "", kill_text(attempt), ""))
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
    """Whether the model gives a sample the same value in any batch, which no aggregation can ensure."""
    if not measured:
        return []
    small, *_, large = measured["sizes"]
    return [
        ("the model's kernels", f"round {measured['moved']} of {measured['values']} values differently"),
        ("", f"in batches of {small} and in batches of {large}"),
    ]


def _evaluation_table(measured: Mapping[str, Any]) -> Table:
    """The evaluation at each batch size: the exact rows agree, the others do not."""
    sizes = list(measured["sizes"].values())

    def row(name: str, values: Sequence[str]) -> tuple[str, ...]:
        return (name, *values, "yes" if len(set(values)) == 1 else "no")

    rows = [
        row("loss, from stored values", [size["kept"] for size in sizes]),
        row("  mean of batch means", [size["means"] for size in sizes]),
        row("  sums in float32", [size["float32"] for size in sizes]),
        *(row(f"{name}, recomputed", [size["results"][name] for size in sizes]) for name in sizes[0]["results"]),
    ]
    columns = ("", *(f"batches of {size}" for size in measured["sizes"]), "same")
    return Table("Its evaluation, at three batch sizes", columns, tuple(rows))


def as_json(comparison: Comparison, killed: RunRecord) -> dict[str, Any]:
    """The comparison as JSON."""
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
        return "completed"
    if kill.during == "step":
        return f"SIGKILL in step {kill.step + 1}"
    return f"SIGKILL during the save of step {kill.step}"


def _left_text(kill: Kill) -> str:
    """What a kill during a save left on the disk."""
    if kill.committed:
        return "a complete checkpoint, not yet acknowledged"
    if not kill.leftovers:
        return "nothing: it had not written a file yet"  # ranks compare what they have first
    files = "1 file" if len(kill.leftovers) == 1 else f"{len(kill.leftovers)} files"
    return f"torn: {bytes_text(sum(kill.leftovers.values()))} in {files}, no manifest"


def _exact(value: float) -> str:
    return f"{value:.6f} ({value.hex()})"

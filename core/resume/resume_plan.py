"""`ResumePlan`: what a resume does with every component. `Refusal`: every reason why it cannot. Both are values that print."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.digest import digest_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.json_values import Json
from trainfold.core.printable import printable
from trainfold.core.problem import Problem
from trainfold.core.resume.drift import GROUPS, Drift, recipes_of
from trainfold.core.state.audit import component_of, not_restored, not_restored_text
from trainfold.core.state.contract_kinds import is_of_rank_zero

_SHOWN: Final = 3
_NAMED: Final = 16
_LOSSES: Mapping[str, str] = {
    "missing": "not saved, and so begins at what the script gave it",
    "unexpected": "saved, and dropped, because this run has no place for it",
}
# the note of such an action
ONE_FOR_ALL: Final = "declared to be rank 0's now; the values that the other ranks had are dropped"
NOT_ASKED_FOR: Final = "not asked for"
Verb: TypeAlias = Literal["load", "adopt", "reset", "keep"]
Rates: TypeAlias = Literal["own", "checkpoint", "script"]


@final
@attrs.frozen
class ComponentAction:
    """What happens to one component.

    Attributes:
        name: the component.
        verb: ``load`` (into the target's structure), ``adopt`` (take the saved structure), ``reset`` (start from scratch, on purpose) or
            ``keep`` (the target's stays: not asked for, or not saved).
        part: index of the saved structure, for components that are saved once for each rank.
        tensors: how many stored tensors it uses.
        size_bytes: the size of these tensors.
        cast: path -> dtype to cast to.
        kept: paths that keep the target's value.
        note: why, in words.
        rates: of an optimizer, whose learning rate it gets: that of the value that it gets (``own``), or that of the other side, because its
            scheduler is of that side.
    """

    name: str
    verb: Verb
    part: int = 0
    tensors: int = 0
    size_bytes: int = 0
    cast: Mapping[str, str] = attrs.field(factory=dict)
    kept: tuple[str, ...] = ()
    note: str = ""
    rates: Rates = "own"


@final
@attrs.frozen
class ResumePlan:
    """What a resume will do. Prints as a table.

    Attributes:
        run: the location of the run.
        checkpoint: the directory of the chosen checkpoint.
        manifest: its proved manifest.
        actions: one for each component.
        drifts: everything that differs and is not refused.
        passed_over: newer checkpoints that were not chosen, and what is wrong with each.
        notes: what was ignored or assumed.
        contract: what the next step of the resumed state must fit.
        fresh_masters: whether the fp32 masters of the optimizer are made again from the weights. They are if the weights are loaded and
            the optimizer is not: its old masters would revert them.
    """

    run: str
    checkpoint: str
    manifest: Manifest
    actions: tuple[ComponentAction, ...]
    drifts: tuple[Drift, ...]
    passed_over: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    contract: Mapping[str, Json] = attrs.field(factory=dict)
    fresh_masters: bool = False

    @property
    def step(self) -> int:
        """The step from which the run continues."""
        return self.manifest.head.step

    @property
    def size_bytes(self) -> int:
        """The size of all tensors that are used."""
        return sum(action.size_bytes for action in self.actions)

    @property
    def unsaved(self) -> dict[str, str]:
        """State of the loaded components that the checkpoint lists as not saved: attribute -> what it holds."""
        return not_restored(
            self.manifest.contract, [each.name for each in self.actions if each.verb in ("load", "adopt")]
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user: checkpoints passed over, drifts with the verdict ``warn``, and state that was not saved."""
        return (
            *(f"passed over {problem}" for problem in self.passed_over),
            *(str(drift) for drift in self.drifts if drift.verdict == "warn"),
            *((not_restored_text(self.unsaved, checkpoint=self.checkpoint),) if self.unsaved else ()),
        )

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses under a policy: the leaves that start at the script's values, those that are dropped, and data that are not read. And values of ranks that are now rank 0's."""
        found = [
            f"{what}: {_some([each.where for each in those])}"
            for kind, what in _LOSSES.items()
            if (those := [each for each in self.drifts if each.kind == kind and each.verdict == "adapt"])
        ]
        if any(each.kind == "data_ranks" for each in self.drifts):
            found += [f"{each.name}: {each.note}" for each in self.actions if each.name == "dataset" and each.note]
        found += [f"{each.name}: {each.note}" for each in self.actions if each.note == ONE_FOR_ALL]
        return tuple(printable(f"{self.run}/{self.checkpoint}: {each}") for each in found)

    def digest(self) -> str:
        """A digest of every decision; equal on all ranks that decide the same."""
        files = [file.digest for file in self.manifest.files]
        cut = {saved.name for saved in self.manifest.components if len(saved.nodes) > 1}  # each rank reads its own part
        actions = [
            ComponentAction(each.name, each.verb, note=each.note) if each.name in cut else each for each in self.actions
        ]
        drifts = tuple(drift for drift in self.drifts if not is_of_rank_zero(drift.where))
        decided = (self.checkpoint, str(self.manifest.head), files, actions, drifts)
        return digest_of(repr(decided).encode("utf-8", "backslashreplace"))

    def __str__(self) -> str:
        rows = [
            f"{action.name:12} {action.verb:6} {action.tensors:>7} tensors {action.size_bytes:>15,} bytes"
            f"{f'  cast {len(action.cast)}' if action.cast else ''}{f'  kept {len(action.kept)}' if action.kept else ''}"
            f"{f'  ({action.note})' if action.note else ''}"
            for action in self.actions
        ]
        return "\n".join(
            [
                printable(f"resume {self.run} from {self.checkpoint}: step {self.step}, {self.size_bytes:,} bytes"),
                *map(printable, rows),
                *(f"drift        {drift}" for drift in self.drifts),
                *(f"passed over  {problem}" for problem in self.passed_over),
                *(printable(f"not saved    {path}: {what}") for path, what in self.unsaved.items()),
                *(printable(f"note         {note}") for note in self.notes),
            ]
        )

    def _repr_html_(self) -> str:
        from trainfold.core.markup.html_table import html_table, notebook  # late: commands show no HTML

        title = f"resume {self.run} from {self.checkpoint}: step {self.step}, {self.size_bytes:,} bytes"
        rows = [(each.name, each.verb, str(each.tensors), f"{each.size_bytes:,}", each.note) for each in self.actions]
        columns = ("component", "what", "tensors", "bytes", "note")
        tables = [html_table(title, columns, rows, numbers=("tensors", "bytes"))]
        notes = [
            *(("drift", str(drift)) for drift in self.drifts),
            *(("passed over", str(problem)) for problem in self.passed_over),
            *(("not saved", f"{path}: {what}") for path, what in self.unsaved.items()),
            *(("note", note) for note in self.notes),
        ]
        return notebook("".join([*tables, *([html_table("What to know", ("", ""), notes)] if notes else [])]))


@final
@attrs.frozen
class Refusal:
    """Every reason why a resume would not be exact. Prints as a list.

    Attributes:
        run: the location of the run.
        checkpoint: the checkpoint that was considered; None if there was none.
        reasons: drifts that the policy refuses, and problems of checkpoints.
    """

    run: str
    checkpoint: str | None
    reasons: tuple["Drift | Problem", ...]

    @property
    def finds_nothing(self) -> bool:
        """Whether the run holds no checkpoint, not even a bad one, so that a program may train from the start.

        The files of a save that did not finish are not a checkpoint. A checkpoint of a newer version, or a planted link, is a bad one.
        """
        first, *others = self.reasons or (None,)
        none_there = isinstance(first, Problem) and first.error in {"RunEmpty", "CheckpointMissing"}
        unfinished = all(isinstance(each, Problem) and each.error == "CheckpointTorn" for each in others)
        return isinstance(first, Problem) and none_there and unfinished and first.where == self.run

    def about_optional(self, optional: Collection[str]) -> dict[str, str]:
        """The optional components that all reasons are about, so that a resume without them is possible; empty if there is another reason.

        Args:
            optional: components that the run can do without.

        Returns:
            Component -> why it cannot be restored.
        """
        about = [(component_of(each.where) if isinstance(each, Drift) else "", each) for each in self.reasons]
        if not {name for name, _ in about} <= set(optional):
            return {}
        first = dict(reversed(about))  # the first of each
        return {name: f"cannot be restored: {first[name]}" for name in sorted(first)}

    @property
    def fix(self) -> str:
        """The next move: the policy to pass if one helps; otherwise what to put back.

        Examples:
            >>> from trainfold.core.resume.drift import make_drift
            >>> Refusal("r", None, (make_drift("batch_size", "batch_size", saved=8, wanted=16, policy={}),)).fix
            'put it back, or pass policy={"batch_size": "adapt"} if it is meant: "Change the batch size" in docs/how-to/change-a-run.md'
        """
        drifts = [each for each in self.reasons if isinstance(each, Drift)]
        if self.reasons and isinstance(self.reasons[0], Problem):
            return self.reasons[0].fix
        fixed = [each for each in drifts if each.to_type is None and each.reset is None]
        typed = ", ".join(f'"{kind}": "{verdict}"' for kind, verdict in _typed(drifts).items())
        resets = list(dict.fromkeys(each.reset for each in drifts if each.reset is not None))
        recipes = " and ".join(f'"{name}"' for name in recipes_of(drifts))
        page = f": {recipes} in docs/how-to/change-a-run.md" if recipes else ""
        ways = " and ".join([*resets, *([f"pass policy={{{typed}}}"] if typed else ())])
        if not fixed:
            losses = [each for each in drifts if each.is_loss]
            return f"{_put_back(drifts)}, or {ways} if {_it(drifts)} meant{_what_is_lost(losses)}{page}"
        wheres = [each.where for each in fixed]
        more = f" and {len(wheres) - _SHOWN} more" if len(wheres) > _SHOWN else ""
        others = f"; for the others, {ways} if they are meant" if ways else ""
        if all(each.is_of_buffer for each in fixed):
            run_one = (
                "run one batch through the model before it is attached, where these buffers get their size from one, or"
            )
            return f"{run_one} put them back{others}{page}"
        return f"put {', '.join(wheres[:_SHOWN])}{more} back, or start another run{others}{page}"

    @property
    def listed(self) -> str:
        """Every reason, a line each, without the fix that `fix` repeats."""
        fix = self.fix
        return "\n".join(
            f"  {str(each).removesuffix(f'; {printable(fix, keep=chr(10))}') if isinstance(each, Problem) else each}"
            for each in self.reasons
        )

    @property
    def exit_code(self) -> int:
        """The code of the only problem, or of a damaged run, else that of a refusal (20)."""
        first = self.reasons[0] if self.reasons else None
        if isinstance(first, Problem) and first.error == "RunDamaged":
            return first.exit_code  # the other problems follow from it
        codes = {reason.exit_code if isinstance(reason, Problem) else 20 for reason in self.reasons}
        return codes.pop() if len(codes) == 1 else 20

    def __str__(self) -> str:
        return "\n".join(f"  {reason}" for reason in self.reasons)

    def _repr_html_(self) -> str:
        from trainfold.core.markup.html_table import html_table, notebook  # late: commands show no HTML

        place = self.run if self.checkpoint is None else f"{self.run}/{self.checkpoint}"
        rows = [*(("why", str(reason)) for reason in self.reasons), ("fix", self.fix)]
        return notebook(html_table(f"no resume of {place}", ("", ""), rows))


def _typed(drifts: Sequence[Drift]) -> dict[str, str]:
    """Kind -> the verdict to pass."""
    return {each.kind: verdict for each in drifts if (verdict := each.to_type) is not None}


def _it(drifts: Sequence[Drift]) -> str:
    return "it is" if len(drifts) == 1 else "they are"


def _put_back(drifts: Sequence[Drift]) -> str:
    """How to make the run as it was saved, by the first cause."""
    cause = drifts[0] if drifts else None
    if cause is not None and cause.kind == "unexpected" and cause.where.startswith(GROUPS):
        return "give the optimizer these parameters before attach, as with add_param_group"
    if cause is not None and cause.is_loss and cause.where.startswith("model."):
        return (
            "change the model before attach as it was changed when it was saved (pruned, parametrized, another layer)"
        )
    return f"put {'it' if len(drifts) == 1 else 'them'} back"


def _what_is_lost(losses: Sequence[Drift]) -> str:
    kinds = {each.kind for each in losses}
    costs = ["what is missing begins at the script's values"] if "missing" in kinds else []
    costs += ["what is unexpected is dropped"] if "unexpected" in kinds else []
    return f" ({', and '.join(costs)})" if costs else ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"

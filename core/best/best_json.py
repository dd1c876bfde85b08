"""A `BestFile` as the bytes of a run's ``best.json``: strict, versioned, and ending with the digest of what precedes it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import attrs

from trainfold.core.best.record import BestRecord, make_best_record
from trainfold.core.best.top_n import BestEntry, ranked
from trainfold.core.errors import CheckpointError, InvalidArgument
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.sealed_json import SEAL, SealedJson
from trainfold.core.format.strict_json import finite, hostile, int_of, items, read_fields, row, single_name, text_of
from trainfold.core.json_values import shown

BEST_FILE = "best.json"
BEST_FORMAT = "trainfold-best"
BEST_VERSION = 2
BEST_LIMIT_BYTES = 2**16  # 200 characters of a metric's name, each escaped, 200 of a run id, and the N best
MOST_KEPT = 500
Placed: TypeAlias = tuple[BestEntry, int]  # with the timeline of its checkpoint
_FIELDS = {
    **SEAL,
    "run_id": single_name,
    "metric": text_of,
    "direction": text_of,
    "min_delta": finite,
    "score": finite,
    "step": int_of,
    "timeline": int_of,
}
_KEPT = items(row(finite, int_of, int_of), least=1, most=MOST_KEPT)


@final
@attrs.frozen
class BestFile:
    """The content of a ``best.json``.

    Attributes:
        record: the best.
        timeline: the timeline of the run that its checkpoint belongs to.
        kept: the N best, the best one first, each with its timeline; empty if only the one is kept.
    """

    record: BestRecord
    timeline: int = 0
    kept: tuple[Placed, ...] = ()

    @property
    def best(self) -> Placed:
        """The best as an entry, with its timeline."""
        assert self.record.step is not None  # a record with a score has a step
        return BestEntry(self.record.score, self.record.step), self.timeline

    @property
    def entries(self) -> tuple[Placed, ...]:
        """The N best, or the only one."""
        return self.kept or (self.best,)

    @property
    def name(self) -> str:
        """The checkpoint of the best."""
        return directory_of(self.best[0].step)

    @property
    def names(self) -> dict[str, str]:
        """The checkpoints that stay, whether they exist or not -> why, the best one first."""
        others = {directory_of(entry.step): f"one of the best {len(self.kept)}" for entry, _ in self.kept}
        return {self.name: "the best", **{name: why for name, why in others.items() if name != self.name}}

    @property
    def timelines(self) -> dict[str, int]:
        """Each of `names` -> the timeline in which it was measured."""
        return {directory_of(entry.step): timeline for entry, timeline in (*self.entries, self.best)}

    def names_in(self, timelines: Mapping[str, int]) -> dict[str, str]:
        """`names` without the checkpoints that are of another timeline: a step that was trained again after a rewind is not the best.

        Args:
            timelines: checkpoint -> its timeline, as far as that is known.

        Examples:
            >>> from trainfold.retention import updated
            >>> file = BestFile(updated(make_best_record(run_id="a1", metric="loss", direction="min"), {"loss": 0.5}, step=10))
            >>> file.names_in({"step-00000010": 0}), file.names_in({"step-00000010": 1})
            ({'step-00000010': 'the best'}, {})
        """
        of = self.timelines
        return {name: why for name, why in self.names.items() if timelines.get(name, of[name]) == of[name]}

    @property
    def scores(self) -> dict[tuple[str, int], float]:
        """(checkpoint, timeline) -> score, for every entry; a step trained again is on another timeline."""
        entries = (*self.entries, self.best)
        return {(directory_of(entry.step), of): entry.score for entry, of in entries if entry.score is not None}

    def carried(
        self, entries: Sequence[Placed], wanted: BestRecord, *, timelines: Mapping[int, int]
    ) -> tuple[tuple[Placed, ...], tuple[str, ...]]:
        """The entries that a run continues with, and why the others do not count: one clause for each reason.

        They count if run, metric and direction are the wanted ones, and if their checkpoints can be loaded.

        Args:
            entries: the best, or the N best.
            wanted: the record that the run would start with.
            timelines: step -> timeline, for the checkpoints that can be loaded.

        Examples:
            >>> from trainfold.retention import updated
            >>> wanted = make_best_record(run_id="a1", metric="loss", direction="min")
            >>> file = BestFile(updated(wanted, {"loss": 0.5}, step=10))
            >>> file.carried(file.entries, wanted, timelines={10: 0, 20: 0})
            (((BestEntry(score=0.5, step=10), 0),), ())
            >>> file.carried(file.entries, wanted, timelines={20: 0})
            ((), ('the checkpoint of step 10 is not there any more',))
        """
        names = {"run_id": "run", "metric": "metric", "direction": "direction"}
        other = [
            f"it is of {called} {was!r}, not {now!r}"
            for name, called in names.items()
            if (was := getattr(self.record, name)) != (now := getattr(wanted, name))
        ]
        there = tuple((entry, of) for entry, of in entries if timelines.get(entry.step) == of)
        gone = [
            f"the checkpoint of step {entry.step} is not there any more"
            for entry, of in entries
            if timelines.get(entry.step) != of
        ]
        return () if other else there, (*other, *gone)


def best_to_json(record: BestRecord, *, timeline: int = 0, kept: Iterable[Placed] = ()) -> bytes:
    """The file's bytes, in version 1 if only one is kept, so that an older trainfold reads it too.

    Law: ``best_file_from_json(best_to_json(record, timeline=t, kept=k)) == BestFile(record, t, k)`` for a ranked ``k``; equal
    arguments give equal bytes, and the order of ``kept`` makes no difference.

    Args:
        record: a best that has a run, a score and a step.
        timeline: the timeline of the run that the step's checkpoint belongs to.
        kept: the N best, each with its timeline.

    Raises:
        InvalidArgument: if it lacks one of them; for more than `MOST_KEPT` entries, or two entries of one step.

    Examples:
        >>> from trainfold.retention import updated
        >>> record = updated(make_best_record(run_id="a1", metric="loss", direction="min"), {"loss": 0.5}, step=10)
        >>> best_file_from_json(best_to_json(record)) == BestFile(record)
        True
    """
    if record.score is None or record.step is None or record.run_id is None or not math.isfinite(record.score):
        raise InvalidArgument("record", expected="a best with a run, a finite score and a step", found=shown(record),
                              fix="save it once a result has won")  # fmt: skip
    each = tuple(kept)
    timelines = {entry.step: of for entry, of in each}
    in_order = ranked((entry for entry, _ in each), direction=record.direction)
    places = [[entry.score, entry.step, timelines[entry.step]] for entry in in_order]
    if len(places) > MOST_KEPT:
        raise InvalidArgument("kept", expected=f"at most {MOST_KEPT} entries", found=len(places),
                              fix="keep fewer of the best: each is a whole checkpoint")  # fmt: skip
    floats = {"min_delta": float(record.min_delta), "score": float(record.score)}
    more = {"kept": places} if places else {}
    document = {**attrs.asdict(record), **floats, "timeline": timeline, **more}
    data = _FILE.encode(document, version=BEST_VERSION if places else 1)
    try:
        best_file_from_json(data)
    except CheckpointError as error:  # a record that was not made by make_best_record
        raise InvalidArgument(
            "record", expected=error.expected, found=error.found, fix="make it with make_best_record and updated"
        ) from None
    return data


def best_file_from_json(data: bytes, where: str = BEST_FILE) -> BestFile:
    """Read a file's bytes.

    Raises:
        CheckpointDamaged: if the digest at the end does not fit the bytes before it.
        CheckpointForeign: if another program wrote it.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if the digest fits and the contents are still invalid.

    Examples:
        >>> best_file_from_json(b"{}")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointDamaged: best.json: expected the digest of its own bytes at its end, found 2 bytes \
that have another digest; restore best.json from a copy of the run, or remove it: the best then starts without a score
    """
    return _FILE.decode(data, where, lambda document, version: _read(document, version, where))


BEST_FIX = f"restore {BEST_FILE} from a copy of the run, or remove it: the best then starts without a score"
_FILE = SealedJson(BEST_FORMAT, BEST_VERSION, BEST_LIMIT_BYTES, BEST_FIX)


def _read(document: dict[str, Any], version: int, where: str) -> BestFile:
    found = read_fields(document, _FIELDS if version == 1 else {**_FIELDS, "kept": _KEPT}, where)
    kept = tuple((BestEntry(score, step), timeline) for score, step, timeline in found.get("kept", ()))
    try:
        record = make_best_record(**{name: found[name] for name in ("run_id", "metric", "direction", "min_delta")})
        in_order = ranked((entry for entry, _ in kept), direction=record.direction)
    except InvalidArgument as error:
        raise hostile(f"{where}: {error.where}", error.expected, error.found) from None
    if tuple(entry for entry, _ in kept) != in_order:
        raise hostile(f"{where}: kept", "the best entry first", shown(document["kept"]))
    return BestFile(attrs.evolve(record, score=found["score"], step=found["step"]), found["timeline"], kept)

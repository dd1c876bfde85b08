"""A `BestRecord` as the bytes of a run's ``best.json``: strict, versioned, and ended by the digest of what is before it."""

import math
from typing import Any

import attrs

from trainfold.core.best import BestRecord, make_best_record
from trainfold.core.codec import digest_of
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointForeign,
    CheckpointHostile,
    FutureVersion,
    InvalidArgument,
)
from trainfold.core.manifest import END, TAIL
from trainfold.core.scalars import canonical_json, shown
from trainfold.core.strict import count, fields, hostile, single_name, strict_json

BEST_FILE = "best.json"
BEST_FORMAT = "trainfold-best"
BEST_VERSION = 1
BEST_LIMIT_BYTES = 2**14  # 200 characters of a metric's name, each escaped, and 200 of a run id
_FIELDS = {"format", "version", "run_id", "metric", "direction", "min_delta", "score", "step", "timeline", "digest"}


def best_to_json(record: BestRecord, *, timeline: int = 0) -> bytes:
    """The file's bytes.

    Law: ``best_from_json(best_to_json(record, timeline=t)) == (record, t)``; equal records give equal bytes.

    Args:
        record: a best that has a run, a score and a step.
        timeline: the timeline of the run that the step's checkpoint belongs to.

    Raises:
        InvalidArgument: if it has none of them.

    Examples:
        >>> from trainfold.core.best import updated
        >>> record = updated(make_best_record(run_id="a1", metric="loss", direction="min"), {"loss": 0.5}, step=10)
        >>> best_from_json(best_to_json(record)) == (record, 0)
        True
    """
    if record.score is None or record.step is None or record.run_id is None or not math.isfinite(record.score):
        raise InvalidArgument("record", expected="a best with a run, a finite score and a step", found=shown(record),
                              mend="save it once a result has won")  # fmt: skip
    floats = {"min_delta": float(record.min_delta), "score": float(record.score)}
    named = {"format": BEST_FORMAT, "version": BEST_VERSION}
    covered = canonical_json({**named, **attrs.asdict(record), **floats, "timeline": timeline})[:-1]
    data = covered + TAIL + digest_of(covered).encode() + END
    try:
        best_from_json(data)
    except CheckpointError as error:  # a record that was not made by make_best_record
        raise InvalidArgument("record", expected=error.expected, found=error.found, mend="make it anew") from None
    return data


def best_from_json(data: bytes, where: str = BEST_FILE) -> tuple[BestRecord, int]:
    """The record in a file's bytes, and the timeline that its step is of.

    Raises:
        CheckpointDamaged: if the digest at the end does not fit the bytes before it.
        CheckpointForeign: if another program wrote it.
        FutureVersion: if a newer trainfold wrote it.
        CheckpointHostile: if the digest fits and the contents cannot be all the same.

    Examples:
        >>> best_from_json(b"{}")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.CheckpointDamaged: best.json: expected the digest of its own bytes at its end, found 2 bytes \
that have another digest; restore best.json from a copy of the run, or remove it: the best then begins anew
    """
    covered = data[: max(0, len(data) - _TAIL_BYTES)]
    if len(data) > BEST_LIMIT_BYTES or data[len(covered) :] != TAIL + digest_of(covered).encode() + END:
        raise CheckpointDamaged(where, expected="the digest of its own bytes at its end",
                                found=f"{len(data)} bytes that have another digest", mend=BEST_MEND)  # fmt: skip
    try:
        return _read(data, where)
    except CheckpointHostile as error:
        raise CheckpointHostile(error.where, expected=error.expected, found=error.found, mend=BEST_MEND) from None


BEST_MEND = f"restore {BEST_FILE} from a copy of the run, or remove it: the best then begins anew"
_TAIL_BYTES = len(TAIL) + len(digest_of(b"")) + len(END)


def _read(data: bytes, where: str) -> tuple[BestRecord, int]:
    document = strict_json(data, where)
    if document.get("format") != BEST_FORMAT:
        raise CheckpointForeign(where, expected=BEST_FORMAT, found=shown(document.get("format")), mend=BEST_MEND)
    version = count(document.get("version"), where, least=1)
    if version > BEST_VERSION:
        raise FutureVersion(where, expected=f"version {BEST_VERSION}", found=version, mend="upgrade trainfold")
    fields(document, _FIELDS, where, exact=True)
    try:
        record = make_best_record(
            run_id=single_name(document["run_id"], where),
            metric=document["metric"],
            direction=document["direction"],
            min_delta=_float(document["min_delta"], where),
        )
    except InvalidArgument as error:
        raise hostile(f"{where}: {error.where}", error.expected, error.found) from None
    score, step = _float(document["score"], where), count(document["step"], where)
    return attrs.evolve(record, score=score, step=step), count(document["timeline"], where)


def _float(value: Any, where: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise hostile(where, "a finite float", shown(value))
    return value

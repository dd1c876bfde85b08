"""`BestRecord`: the best result of a run so far, and whether a new one beats it.

The direction is explicit and never guessed from the name, and a score that is missing or not finite never wins.
"""

from collections.abc import Mapping
from typing import Any, final

import attrs

from trainfold.core.best.score import Direction, beats, checked_direction, checked_step, finite_given
from trainfold.core.checks import positive
from trainfold.core.errors import InvalidArgument
from trainfold.core.json_values import shown


@final
@attrs.frozen
class BestRecord:
    """The best result of a run so far; make it with `make_best_record`, replace it with `updated`, keep it with ``save_best``.

    Attributes:
        run_id: the run that it belongs to; None until ``save_best`` or ``load_best`` has read it from the run.
        metric: the name of the metric in an evaluation's result.
        direction: ``"min"`` if less is better, ``"max"`` if more is.
        min_delta: a score must improve by more than this.
        score: the best score, finite; None before the first.
        step: the optimizer step that it was measured at; None before the first.
    """

    run_id: str | None
    metric: str
    direction: Direction
    min_delta: float = 0.0
    score: float | None = None
    step: int | None = None


def make_best_record(
    *, metric: str, direction: Direction, min_delta: float = 0.0, run_id: str | None = None
) -> BestRecord:
    """Return a checked record without a score.

    Args:
        metric: the name of the metric in an evaluation's result.
        direction: ``"min"`` or ``"max"``; there is no default.
        min_delta: a score wins only if it is better by more than this; 0.0 for any strict improvement.
        run_id: the run; None for the one that the record is saved into.

    Raises:
        InvalidArgument: naming the invalid argument.

    Examples:
        >>> make_best_record(metric="loss", direction="min", run_id="a1")
        BestRecord(run_id='a1', metric='loss', direction='min', min_delta=0.0, score=None, step=None)
    """
    if run_id is not None and (not isinstance(run_id, str) or not run_id):
        raise InvalidArgument("run_id", expected="the id of a run, or None", found=shown(run_id),
                              fix="leave it out: it is read from the run")  # fmt: skip
    if not isinstance(metric, str) or not 0 < len(metric) <= 200:
        raise InvalidArgument("metric", expected="the name of a metric, of 1 to 200 characters", found=shown(metric),
                              fix="name one metric of the suite, such as 'loss'")  # fmt: skip
    delta = positive("min_delta", min_delta, least=0, fix="use 0.0 for any strict improvement")
    return BestRecord(run_id, metric, checked_direction(direction), delta)


def is_better(record: BestRecord, result: Mapping[str, Any]) -> bool:
    """Whether a result beats the best so far.

    It does if its score is a finite number that improves on the record's by more than ``min_delta``, or if the record has no
    score yet. The comparison is exact: no rounding of ``best - min_delta`` decides. These never win: a metric that is absent or
    None (its denominator was 0), NaN, an infinity, and any result of an evaluation that was cut short.

    Args:
        record: the best so far.
        result: what ``evaluate`` returned, or a dict. An `Evaluation` knows its suite, so a mistyped metric is an error at
            once; a dict does not, so a name that it lacks is a metric without a value.

    Raises:
        InvalidArgument: if the metric's result is not one number, or no metric of the suite has the record's name.

    Examples:
        >>> record = updated(make_best_record(metric="loss", direction="min"), {"loss": 0.5}, step=10)
        >>> [is_better(record, {"loss": loss}) for loss in (0.4, 0.5, 0.0, float("nan"), None)]
        [True, False, True, False, False]
        >>> is_better(record, {})
        False
    """
    score = score_of(record, result)
    if score is None:
        return False
    return record.score is None or beats(score, record.score, direction=record.direction, min_delta=record.min_delta)


def updated(record: BestRecord, result: Mapping[str, Any], *, step: int) -> BestRecord:
    """The record after one more evaluation: the result's score and step if it `is_better`, else the record itself.

    Args:
        record: the best so far.
        result: what ``evaluate`` returned, or a dict.
        step: the optimizer step that was evaluated.

    Raises:
        InvalidArgument: as `is_better`; or if the step is not an int >= 0.

    Examples:
        >>> record = make_best_record(metric="accuracy", direction="max", min_delta=0.01)
        >>> for step, accuracy in enumerate([float("nan"), 0.5, 0.505, 0.52]):
        ...     record = updated(record, {"accuracy": accuracy}, step=step)
        >>> record.score, record.step
        (0.52, 3)
    """
    checked_step(step)
    return attrs.evolve(record, score=score_of(record, result), step=step) if is_better(record, result) else record


def score_of(record: BestRecord, result: Mapping[str, Any]) -> float | None:
    """The score of a result under a record: a finite float; None for a result that can never win.

    Raises:
        InvalidArgument: as `is_better`.

    Examples:
        >>> score_of(make_best_record(metric="loss", direction="min"), {"loss": 0.0})
        0.0
    """
    if not isinstance(record, BestRecord):
        raise InvalidArgument("record", expected="a BestRecord", found=shown(record),
                              fix="make it with make_best_record(metric=..., direction=...)")  # fmt: skip
    if not isinstance(result, Mapping):
        raise InvalidArgument("result", expected="a mapping from metric names", found=shown(result),
                              fix="pass what evaluate returned")  # fmt: skip
    name = record.metric
    names = getattr(getattr(result, "tally", None), "accumulators", None)  # of an Evaluation; a plain dict has none
    if names is not None and name not in names:
        raise InvalidArgument("metric", expected=f"one of {sorted(names)}", found=repr(name),
                              fix="make the record with the name that the metric has in the suite")  # fmt: skip
    value = result.get(name)
    if value is None:
        return None
    try:
        score = finite_given(value)
    except TypeError:
        raise InvalidArgument(
            f"result[{name!r}]",
            expected="one number",
            found=shown(value),
            fix=f"give the suite a metric whose result is one number, or select one: {{{name!r}: result[{name!r}][...]}}",
        ) from None
    return score if getattr(result, "complete", True) else None

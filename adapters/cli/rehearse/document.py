"""The result of a rehearsal as JSON."""

from typing import Any

import attrs

from trainfold.adapters.cli.rehearse.findings import Rehearsed, error_of, hit_text
from trainfold.adapters.cli.rehearse.kept import MeasuredDifference
from trainfold.adapters.cli.rehearse.starts import Start


def as_json(rehearsed: Rehearsed) -> dict[str, Any]:
    """The whole result, in values that JSON can hold."""
    conclusion, nproc = rehearsed.conclusion, rehearsed.settings.nproc
    return {
        "command": list(rehearsed.settings.command),
        "settings": {**attrs.asdict(rehearsed.settings), "nproc": None if nproc is None else list(nproc)},
        "outcome": "never saved" if conclusion is None else conclusion.outcome,
        "identical": conclusion is not None and conclusion.outcome == "identical" and error_of(rehearsed) is None,
        "repeats_itself": conclusion is not None and not conclusion.noise,
        "kills": rehearsed.kills,
        "checkpoints_compared": 0 if conclusion is None else conclusion.checkpoints,
        "values_compared": 0 if conclusion is None else conclusion.values,
        "differences": [] if conclusion is None else [attrs.asdict(each) for each in conclusion.found],
        "noise": [] if conclusion is None else [attrs.asdict(each) for each in conclusion.noise],
        "computed_again": [] if conclusion is None else [attrs.asdict(each) for each in conclusion.again],
        "unseeded_streams": [] if conclusion is None else list(conclusion.unseeded),
        "components_of_ranks": list(rehearsed.of_ranks),
        "values_that_do_not_repeat": [] if conclusion is None else list(conclusion.restless),
        "reasons": [] if conclusion is None else list(conclusion.reasons),
        "failed": None if rehearsed.failed is None else str(rehearsed.failed),
        "first_leaves": _leaves_json(rehearsed.measured),
        "room": dict(rehearsed.room),
        "starts": [_start_json(start) for start in rehearsed.killed],
        "places": {"whole": list(rehearsed.whole.places), "killed": list(rehearsed.killed[-1].places) if rehearsed.killed else []},
    }  # fmt: skip


def _leaves_json(measured: MeasuredDifference | None) -> list[dict[str, Any]]:
    if measured is None:
        return []
    return [
        {"step": measured.step, "leaf": leaf, **attrs.asdict(size)}
        for leaf, size in measured.sizes.items()
        if size is not None
    ]


def _start_json(start: Start) -> dict[str, Any]:
    return {
        "number": start.stretch.number,
        "resumed_from": start.resumed_from,
        "resumed_at": start.stretch.resumed_at,
        "last_step": start.stretch.last_step,
        "kill": None if start.hit is None else attrs.asdict(start.hit),
        "ended": hit_text(start),
    }

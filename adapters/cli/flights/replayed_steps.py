"""`replayed_steps`: with which checkpoint a replay begins, and where it ends."""

import math
from collections.abc import Collection

from trainfold.adapters.cli.flights.read_run import Logs
from trainfold.core.errors import CheckpointMissing, InvalidArgument
from trainfold.core.flight.step_record import is_finite
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.inventory import Inventory


def replayed_steps(
    inventory: Inventory, flights: Logs, begin: int | None, end: int | None, *, until_nonfinite: bool
) -> tuple[int, int]:
    """The step of the checkpoint with which a replay begins, and its last step.

    Args:
        inventory: of the run.
        flights: its logs by rank.
        begin: the step that was asked for; 0 for the start of the program, None for the newest checkpoint before the end that no rewind left behind.
        end: the last step; None for the last one of the log, or the one after it where something not finite is looked for.
        until_nonfinite: whether the replay only looks for what is not finite, which it also does after a checkpoint that was left behind. Without ``begin``
            it begins before the first loss or norm of the logs that is not finite.

    Raises:
        InvalidArgument: if the steps leave nothing to replay. CheckpointMissing: if there is no such checkpoint in the run as it is now.
    """
    last = max((step for flight in flights.values() for step in flight.steps), default=None)
    if end is None and last is not None:
        end = last + until_nonfinite  # a run may have died of it, in a step of which no log has a record
    if end is None:
        raise InvalidArgument("--to", expected="the last step, as the run has no flight log", found="none",
                              fix="pass --to; CheckpointManager(..., record=100) writes a log")  # fmt: skip
    saved = inventory.current_steps
    goes_on_to = end if last is None else min(end, last)
    if begin is None:
        before = min(goes_on_to, _first_nonfinite(flights)) if until_nonfinite else goes_on_to
        begin = max((step for step in saved if step < before), default=0)
    if begin and begin not in saved:
        _check_left_behind(inventory, begin, until_nonfinite=until_nonfinite)
    if not begin < end:
        raise InvalidArgument("--to", expected=f"a step after --from, {begin}", found=str(end), fix="pass a later --to, or an earlier --from")  # fmt: skip
    return begin, end


def _first_nonfinite(flights: Logs) -> float:
    """The first step with a loss or a norm that is not finite on any rank; infinite without one."""
    records = (record for flight in flights.values() for record in flight.steps.values())
    bad = (record.step for record in records for bits in (record.loss, record.norm) if not is_finite(bits))  # fmt: skip
    return min(bad, default=math.inf)


def _check_left_behind(inventory: Inventory, begin: int, *, until_nonfinite: bool) -> None:
    """Refuse a step without a checkpoint, and one of which nothing is recorded, unless that is not asked for."""
    entry, near = inventory.entry(directory_of(begin)), _near(inventory.current_steps.keys(), begin)
    where = f"{inventory.run}/{directory_of(begin)}"
    if entry is None or not entry.is_candidate:
        raise CheckpointMissing(where, expected="a complete checkpoint", found="none",
                                fix=f"pass --from with a step that has one, such as {near}; or 0, for the start of the program")  # fmt: skip
    if not until_nonfinite:
        raise CheckpointMissing(where, expected="a checkpoint of the run as it is now", found="one that was left behind by the run: what followed it is in no log",
                                fix=f"pass --from with another step, such as {near}; or --until-nonfinite, which looks for a NaN there, and compares nothing")  # fmt: skip


def _near(saved: Collection[int], step: int) -> str:
    """The saved steps that are nearest to one, for a message."""
    return ", ".join(str(each) for each in sorted(saved, key=lambda each: (abs(each - step), each))[:6])

"""`should_save`: whether a boundary is one to save at, as a function of the step and nothing else (O06)."""

from collections.abc import Collection

from trainfold.core.errors import InvalidArgument


def should_save(step: int, *, every: int | None, last_saved: int | None = None, events: Collection[str] = ()) -> bool:
    """Say whether to save after this step.

    Law: the steps that are saved do not depend on how often the run was interrupted and resumed (V14): a multiple of
    ``every`` counts from step 0, not from the resume, and is due at the first boundary at or after it.

    Args:
        step: optimizer steps done, >= 0; nothing is due at step 0 for its number alone.
        every: the cadence in steps, >= 1; None for none.
        last_saved: the step of the newest checkpoint, saved or resumed from; None where there is none.
        events: reasons to save beside the cadence, such as ``"final"`` or ``"signal"``.

    Returns:
        Whether to save; never for a step that is saved already.

    Raises:
        InvalidArgument: if ``every < 1``.

    Examples:
        >>> [step for step in range(8) if should_save(step, every=3)]
        [3, 4, 5, 6, 7]
        >>> should_save(4, every=3, last_saved=3), should_save(4, every=3, last_saved=3, events=["final"])
        (False, True)
    """
    check_cadence(every)
    if step == last_saved:
        return False
    if events:
        return True
    if every is None:
        return False
    if last_saved is not None and last_saved > step:
        return step > 0 and step % every == 0  # a rewind: what is newer belongs to another timeline
    return step // every > (last_saved or 0) // every


def check_cadence(every: int | None) -> int | None:
    """Return a cadence that can be.

    Raises:
        InvalidArgument: unless it is an int >= 1 or None.

    Examples:
        >>> check_cadence(500)
        500
    """
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InvalidArgument(
            "every",
            expected="an int >= 1, or None",
            found=repr(every),
            mend="count optimizer steps; None saves by hand",
        )
    return every

"""`plan_retention`: which complete checkpoints may go, decided before anything is deleted."""

from collections.abc import Collection, Iterable

from trainfold.core.errors import InvalidArgument


def plan_retention(
    checkpoints: Iterable[tuple[str, int]],
    *,
    keep_last: int | None,
    written: tuple[str, int],
    protected: Collection[str] = (),
) -> tuple[str, ...]:
    """Say which checkpoints to delete after one was committed.

    Laws: the one just written and the protected ones are never in it (E02); those of a higher step than the one just
    written do not take part (E06), because a rewind has left them to another timeline; of the others, the newest
    ``keep_last``, counting the one just written, stay.

    Args:
        checkpoints: (name, step) of every *complete* checkpoint; incomplete ones neither count nor protect (E01).
        keep_last: how many to keep; 0 and None for all.
        written: (name, step) of the checkpoint that was committed just now.
        protected: names that a pointer or a rule of the user's holds on to; they do not use up the budget.

    Returns:
        The names to delete, oldest first.

    Raises:
        InvalidArgument: if ``keep_last`` is negative.

    Examples:
        >>> saved = [("step-1", 1), ("step-2", 2), ("step-3", 3)]
        >>> plan_retention(saved, keep_last=2, written=("step-3", 3))
        ('step-1',)
        >>> plan_retention(saved, keep_last=1, written=("step-2", 2))
        ('step-1',)
    """
    if not check_keep_last(keep_last):
        return ()
    assert keep_last is not None
    name, step = written
    older = sorted((s, n) for n, s in checkpoints if s <= step and n != name and n not in protected)
    return tuple(n for _, n in older[: max(0, len(older) - (keep_last - 1))])


def check_keep_last(keep_last: int | None) -> int | None:
    """Return a number of checkpoints to keep that can be.

    Raises:
        InvalidArgument: unless it is an int >= 0 or None.

    Examples:
        >>> check_keep_last(3)
        3
    """
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 0):
        raise InvalidArgument(
            "keep_last", expected="an int >= 0, or None", found=repr(keep_last), mend="0 or None keeps all of them"
        )
    return keep_last

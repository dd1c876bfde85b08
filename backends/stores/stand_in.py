"""`stand_in`: the directory that stands for a run while `trainfold replay` runs its program, so that the run itself is only read."""

import functools
import logging
import os
from pathlib import Path
from typing import Final

from trainfold.backends.stores.place import is_object_url, local_path, url_parts
from trainfold.core.errors import NotWritable
from trainfold.core.rehearsal.orders import VARIABLE, Orders, orders_of

_LOG: Final = logging.getLogger("trainfold")
_RUN: Final = "run"  # in the home of the replay


def stand_in(place: str, orders: Orders | None = None) -> str | None:
    """The directory that a replay uses in place of a run, or of what is below it; None without a replay, and for any other place.

    Every store of a run asks this where it is made, so that whatever names the run gets the copy.

    Args:
        place: the path or the URL of a run, in any spelling.
        orders: of the replay; None for those in the environment, which the processes of a program inherit.

    Examples:
        >>> from trainfold.core.rehearsal.orders import ReplayOrders
        >>> orders = Orders("/r", "/r/notes", every=8, steps=8, linger_after=8, replay=ReplayOrders("s3://bucket/runs/a"))
        >>> stand_in("s3:/bucket/runs/a/", orders), stand_in("s3a://bucket/runs/a/ema", orders), stand_in("s3://bucket/runs/ab", orders)
        ('/r/run', '/r/run/ema', None)
    """
    orders = orders_of(os.environ) if orders is None else orders
    if orders is None or orders.replay is None:
        return None
    home, source = Path(orders.home), orders.replay.source
    if is_object_url(place) or is_object_url(source):
        below: str | Path | None = _below_url(place, source)
    else:
        path = Path(local_path(place))
        if path.resolve().is_relative_to((home / _RUN).resolve()):
            return str(path)
        below = _below_path(path, Path(source))
    if below is None:
        return None
    found = str(home / _RUN / below)
    _say(place, found)
    return found


def check_only_read(*places: str) -> None:
    """Refuse to write to a run that is replayed, or to the copy of one from a pair of tiers: for the stores of buckets, where a program uses one itself.

    Raises:
        NotWritable: if one of the places is it.
    """
    for place in places:
        if found := stand_in(place):
            raise NotWritable(place, expected="a run that is not replayed: a replay only reads it", found=f"a writer in a replay ({VARIABLE} is set)",
                              fix=f"pass the store to a manager, to save or to load, which use {found} then; or name the run by its URL")  # fmt: skip


def _below_url(place: str, source: str) -> str | None:
    if not (is_object_url(place) and is_object_url(source)):
        return None
    given, wanted = url_parts(place), url_parts(source)
    return "/".join(given[len(wanted) :]) if given[: len(wanted)] == wanted else None


def _below_path(path: Path, source: Path) -> Path | None:
    """By the names without links; and by the directory itself, which may have another name too, as in a second mount."""
    real, wanted = path.resolve(), source.resolve()
    for each in (real, *real.parents):
        try:
            is_it = each == wanted or each.samefile(wanted)
        except OSError:  # it is not there, or must not be looked at
            continue
        if is_it:
            return real.relative_to(each)
    return None


@functools.cache
def _say(place: str, found: str) -> None:
    """Once for each name."""
    _LOG.warning("REPLAY (%s is set): %s is only read; %s stands for it", VARIABLE, place, found)

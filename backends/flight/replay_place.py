"""`RunPlace`: where the run is that a program names, and whether a rehearsal leaves it there."""

import os
from pathlib import Path
from typing import final

import attrs

from trainfold.backends.stores.local import Run, local_store
from trainfold.backends.stores.place import is_object_url, local_path
from trainfold.core.rehearsal.orders import Orders


@final
@attrs.frozen
class RunPlace:
    """Where a run is that a program names.

    Attributes:
        location: its absolute path; the URL of one that is in no directory.
        is_inside: whether it is in the home of the rehearsal, and stays there.
    """

    location: str
    is_inside: bool


def location_of(run: Run) -> str:
    """The absolute path of a run, or of the near tier of one; the URL of one that is in no directory.

    Examples:
        >>> location_of("/runs/../runs/a"), location_of(Path("s3:/bucket/runs/a/"))
        ('/runs/a', 's3://bucket/runs/a')
    """
    near = local_store(run)
    if near is not None:
        return os.path.abspath(near.url)  # noqa: PTH100 - as a store does
    place = os.fspath(run) if isinstance(run, str | Path) else run.url
    if is_object_url(place):
        scheme, _, rest = place.partition(":")
        return f"{scheme.lower()}://{rest.strip('/')}"
    return os.path.abspath(local_path(place)) if isinstance(run, str | Path) else place  # noqa: PTH100


def run_place(orders: Orders, run: Run) -> RunPlace:
    """Where a run is, as the orders see it.

    Args:
        orders: of the rehearsal.
        run: as the program names it.
    """
    location, home = location_of(run), os.path.realpath(orders.home)
    is_local = location.startswith("/")
    return RunPlace(location, is_local and f"{os.path.realpath(location)}/".startswith(f"{home}/"))

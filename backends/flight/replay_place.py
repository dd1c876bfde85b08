"""`RunPlace`: where the run is that a program names, and whether a rehearsal or a replay leaves it there."""

import os
from pathlib import Path
from typing import final

import attrs

from trainfold.backends.stores.local import LocalStore, Run, local_store
from trainfold.backends.stores.place import is_object_url, local_path
from trainfold.core.rehearsal.orders import Orders


@final
@attrs.frozen
class RunPlace:
    """Where a run is that a program names.

    Attributes:
        location: its absolute path; the URL of one that is in no directory.
        is_inside: whether it is in the home of the rehearsal, and stays there.
        is_replayed: whether it is the run that is replayed: then the replay takes its place.
    """

    location: str
    is_inside: bool
    is_replayed: bool


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
    real = os.path.realpath(location) if is_local else location
    is_inside = is_local and f"{real}/".startswith(f"{home}/")
    source = "" if orders.replay is None else orders.replay.source
    is_source = bool(source) and (os.path.realpath(source) if source.startswith("/") else source) == real
    return RunPlace(location, is_inside, is_source and not is_inside)


def run_of_replay(orders: Orders | None, run: Run) -> Run:
    """The run itself, or the replay that takes its place.

    Args:
        orders: of the replay; None without one.
        run: as the program names it.

    Examples:
        >>> run_of_replay(None, "runs/a")
        'runs/a'
    """
    if orders is None or orders.replay is None or not run_place(orders, run).is_replayed:
        return run
    return LocalStore(Path(orders.home, "run"))

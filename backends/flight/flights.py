"""`read_flights` reads the flight logs of a run, wherever it is; `flight_writer` writes that of a rank."""

import re
from pathlib import Path
from typing import Final, TypeAlias

from trainfold.backends.flight.flight_file import FlightFile
from trainfold.backends.flight.flight_parts import FlightParts
from trainfold.backends.flight.log_parts import part_numbers
from trainfold.backends.flight.log_pieces import read_log
from trainfold.backends.stores.local import Run, local_store, open_store
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.core.errors import CheckpointMissing
from trainfold.core.flight.flight import Flight, flight_of
from trainfold.core.flight.line_scanner import decode_lines

FlightWriter: TypeAlias = FlightFile | FlightParts
_NAME: Final = re.compile(r"flight-(\d{5,})(?:-\d{5,})?\.log")


def flight_name(rank: int) -> str:
    """The name of a rank's flight log in its run.

    Examples:
        >>> flight_name(3)
        'flight-00003.log'
    """
    return f"flight-{rank:05d}.log"


def file_for_log(store: Store, name: str) -> Path | None:
    """The file of a log that can grow; None in a store where none can, and for a log in several parts, as a copy of a bucket has it.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> file_for_log(MemoryStore(), "a.log") is None
        True
    """
    near = local_store(store)
    if near is None or part_numbers(name, near.list())[-1:] > [0]:
        return None
    return Path(near.url).absolute() / name


def flight_writer(store: Store, rank: int) -> FlightWriter:
    """What appends to the flight log of a rank.

    Args:
        store: the run.
        rank: whose log it is.
    """
    name = flight_name(rank)
    path = file_for_log(store, name)
    return FlightParts(store, name) if path is None else FlightFile(path)


def ranks_with_log(names: list[str]) -> list[int]:
    """The ranks that have a flight log, of the names in a run.

    Examples:
        >>> ranks_with_log(["flight-00000.log", "flight-00001.log", "flight-00001-00001.log", "run.json"])
        [0, 1]
    """
    return sorted({int(found[1]) for name in names if (found := _NAME.fullmatch(name))})


def read_flights(run: Run) -> dict[int, Flight]:
    """The flight logs of a run by rank, each up to its torn end. `Flight.damage` has what could not be read before that.

    Args:
        run: its directory, its URL, or its store.

    Raises:
        CheckpointMissing: if it has none.
    """
    store = glimpse(open_store(run))
    names = store.list()
    ranks = ranks_with_log(names)
    if not ranks:
        raise CheckpointMissing(
            store.url,
            expected=f"a flight log, such as {flight_name(0)}",
            found="none",
            fix="record the steps of a run with CheckpointManager(..., record=100)",
        )
    logs = {rank: decode_lines(read_log(store, flight_name(rank), names)) for rank in ranks}
    return {rank: flight_of(log.lines, log.damage) for rank, log in logs.items()}

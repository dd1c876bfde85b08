"""`ReadRun`: a run whose checkpoints were listed once, with its flight logs; and the surroundings in which a checkpoint was made."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, final

import attrs

from trainfold.adapters.cli.locate import Checkpoint, checkpoint_of, open_run
from trainfold.backends.flight.flights import read_flights
from trainfold.backends.stores.place import url_text
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointMissing
from trainfold.core.flight.causes.known_states import VERSIONS
from trainfold.core.flight.flight import Flight
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.history.inventory import Inventory
from trainfold.core.resume.drift import ENVIRONMENT

Logs: TypeAlias = Mapping[int, Flight]
"""The flight logs of a run by rank."""


@final
@attrs.frozen
class ReadRun:
    """A run as it was when it was read: in a bucket each list of its checkpoints is a request for each of them.

    Attributes:
        path: where it is.
        flights: its logs by rank, without what a resume that recorded nothing may have undone; empty if it has none.
        listed: its store, and what that holds; None if there are logs alone, or nothing.
    """

    path: Path
    flights: Logs = attrs.field(factory=dict)
    listed: tuple[Store, Inventory] | None = None

    @property
    def where(self) -> str:
        """Its place, for messages."""
        return url_text(str(self.path))

    @property
    def inventory(self) -> Inventory:
        """What it holds."""
        return Inventory(self.where, None, ()) if self.listed is None else self.listed[1]

    @property
    def saved(self) -> Mapping[int, int]:
        """The steps of its complete checkpoints that no rewind left behind; with each, that of the one before."""
        return self.inventory.current_steps

    @property
    def last(self) -> int:
        """The last step that it has a checkpoint of, or on every rank a record; 0 if it has neither."""
        logged = min((max(flight.steps, default=0) for flight in self.flights.values()), default=0)
        return max(logged, *self.saved, 0)

    def checkpoint(self, step: int) -> Checkpoint:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointMissing: if there is none.
            CheckpointError: the matching subclass, if it cannot be used.
        """
        name = directory_of(step)
        if self.listed is None:
            raise CheckpointMissing(f"{self.where}/{name}", expected="a checkpoint", found="a run that has flight logs alone",
                                    fix="name a run that has this checkpoint")  # fmt: skip
        return checkpoint_of(*self.listed, name)


def read_run(path: Path, *, may_be_empty: bool = False) -> ReadRun:
    """List a run, and read its logs.

    Args:
        path: where it is.
        may_be_empty: whether there may be nothing.

    Raises:
        CheckpointMissing: if there is neither a run nor a log that stands for it.
        CheckpointError: the matching subclass, if it cannot be read.
    """
    try:
        flights = read_flights(str(path))
    except CheckpointMissing:
        flights = {}
    try:
        listed = open_run(path)
    except CheckpointMissing:
        if flights or may_be_empty:
            return ReadRun(path, flights)
        raise
    saved = listed[1].current_steps
    return ReadRun(path, {rank: flight.run_alone(saved) for rank, flight in flights.items()}, listed)


def recorded_environment(manifest: Manifest) -> dict[str, str]:
    """The numerical environment in which a checkpoint was made, by the keys of its contract, in words; and the versions of libraries."""
    drifts = {key: repr(value) for key, value in manifest.contract.items() if key.startswith(ENVIRONMENT)}
    return {**drifts, **{f"{VERSIONS}{name}": version for name, version in manifest.versions.items()}}

"""`LoaderPlace`: the position of each loader of a loop, read from a manifest for `trainfold plan`."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import attrs

from trainfold.adapters.cli.terminal.output import Table
from trainfold.core.errors import TrainfoldError
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.structure.scalars import Unbuilt, read_scalars

_MOST: Final = 1 << 63


@final
@attrs.frozen
class LoaderPlace:
    """The position of one loader.

    Attributes:
        name: its name among several; empty for a single loader.
        kind: ``"map"``, or ``"stateful"`` for a loader with its own state.
        epoch: the epoch.
        batches: how many batches of the epoch were trained on.
        num_workers: how many workers produced them; None if an older trainfold did not record it.
        persistent_workers: whether the workers live on from epoch to epoch.
        streams_moved: whether a random stream that the batches depend on has moved.
    """

    name: str
    kind: str
    epoch: int
    batches: int
    num_workers: int | None
    persistent_workers: bool
    streams_moved: bool | None

    @property
    def advice(self) -> str:
        """The worker settings that a resuming script needs."""
        if self.num_workers is None:
            return "an older trainfold did not record how many workers there were: resume at the end of an epoch"
        same = f"resume with num_workers={self.num_workers}"
        if self.persistent_workers:
            same += ", persistent_workers=True"
        if self.kind == "stateful":
            return f"{same}: its state fits no other number"
        if self.streams_moved:
            return f'{same}; another number is refused, or draws other samples with policy={{"num_workers": "warn"}}'
        return "any number of workers draws the same samples"


def loader_places(manifest: Manifest) -> tuple[LoaderPlace, ...]:
    """The loaders of a checkpoint; empty if it has none, or something else in their place.

    Args:
        manifest: of the checkpoint.
    """
    found = next((each for each in manifest.components if each.name == "dataset"), None)
    if found is None:
        return ()
    try:
        value = read_scalars(found.nodes[0], "dataset")
    except TrainfoldError:
        return ()
    is_opaque = isinstance(value, Unbuilt) and value.kind == "trainfold.Opaque"
    return tuple(_places(value.fields.get("value") if is_opaque else None, ""))


def loaders_table(places: tuple[LoaderPlace, ...]) -> Table:
    """A row for each loader."""
    rows = tuple(
        (
            each.name or "loader",
            f"epoch {each.epoch}, {each.batches} batches of it",
            "?" if each.num_workers is None else str(each.num_workers),
            {None: "?", True: "moved", False: "not moved"}[each.streams_moved],
            each.advice,
        )
        for each in places
    )
    return Table("Loaders", ("loader", "stands at", "workers", "streams", "at a resume"), rows)


def _places(value: Any, name: str) -> Iterator[LoaderPlace]:
    if not isinstance(value, Mapping):
        return
    loaders, kind = value.get("loaders"), value.get("kind")
    if kind == "group" and isinstance(loaders, Mapping):
        for each, held in loaders.items():
            yield from _places(held, str(each))
    elif kind == "prepared":
        yield from _places(value.get("inner"), name)
    elif kind in ("map", "stateful"):
        draws = value.get("draws")
        draws = draws if isinstance(draws, Mapping) else {}
        count, moved = draws.get("count"), draws.get("moved")
        yield LoaderPlace(
            name=name,
            kind=str(kind),
            epoch=_int(value.get("epoch")),
            batches=_int(value.get("batches")),
            num_workers=_int(count) if type(count) is int else None,
            persistent_workers=draws.get("persistent") is True,
            streams_moved=moved if type(moved) is bool else None,
        )


def _int(value: Any) -> int:
    """A count from a file; 0 for one that cannot be, such as an int with thousands of digits, which cannot be printed."""
    return value if type(value) is int and 0 <= value < _MOST else 0

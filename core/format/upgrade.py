"""Schema versions of the manifest, and the upgrade of old documents, with one function for each version."""

from collections.abc import Callable, Mapping
from typing import Any

from trainfold.core.errors import CheckpointHostile, FutureVersion
from trainfold.core.json_values import shown

SCHEMA_VERSION = 5
PLAIN_VERSION = (
    3  # of a checkpoint that needs none of the later ones, so that older releases can read it (ADR-0044, ADR-0048)
)

# version -> the function that makes a document of the next version from one of this version
UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda document: {**document, "indexes": []} if "files" in document else document,  # a head alone stays one
    2: lambda document: document,  # `merged` reads its tables in the form that they have
    3: lambda document: {**document, "references": []} if "files" in document else document,
    4: lambda document: document,  # a file is read in the form that its version has
}


def upgraded(
    document: dict[str, Any],
    where: str,
    *,
    current: int = SCHEMA_VERSION,
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = UPGRADES,
) -> dict[str, Any]:
    """The document in the current schema; its ``schema_version`` remains that of the file.

    Args:
        document: a parsed manifest.
        where: its path, for errors.
        current: the version to arrive at.
        upgrades: the function for each step; an argument so that tests can bring their own history.

    Raises:
        FutureVersion: if the document is newer than ``current``.
        CheckpointHostile: if it has no version, or one that never existed.

    Examples:
        >>> upgraded({"schema_version": 1, "old": 5}, "m", current=2, upgrades={1: lambda d: {"new": d["old"]}})
        {'new': 5, 'schema_version': 1}
    """
    written = document.get("schema_version")
    if type(written) is int and written > current:
        raise FutureVersion(
            where,
            expected=f"schema_version <= {current}",
            found=written,
            fix="upgrade trainfold: this checkpoint was written by a newer release",
        )
    known = range(min(upgrades, default=current), current + 1)
    if type(written) is not int or written not in known:
        raise CheckpointHostile(
            where,
            expected=f"a schema_version in {known.start}..{current}",
            found=shown(written),
            fix="do not use this checkpoint; fall back to an older one",
        )
    for version in range(written, current):
        document = upgrades[version](document)
    return {**document, "schema_version": written}

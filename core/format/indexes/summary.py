"""Reads the summary of a root, which its first line has: the size of the checkpoint, and the fingerprints of its components."""

from collections.abc import Mapping
from typing import Any

from trainfold.core.format.manifest import REFERENCES_VERSION, Summary
from trainfold.core.format.strict_json import digest_text, int_of, list_of, object_of, single_name


def summary_of(document: Mapping[str, Any], where: str) -> Summary:
    """The checked summary of a root, or of its first line.

    Raises:
        CheckpointHostile: if a field is missing or is not what it should be.

    Examples:
        >>> summary_of({"size_bytes": 7, "omitted": ["rng"], "fingerprints": {}}, "manifest.json")
        Summary(size_bytes=7, omitted=('rng',), fingerprints={}, refers=())
    """
    given = object_of(document.get("fingerprints"), where)
    refers = document.get("refers") if document.get("schema_version", 0) >= REFERENCES_VERSION else []
    return Summary(
        int_of(document.get("size_bytes"), where),
        tuple(single_name(name, where) for name in list_of(document.get("omitted"), where)),
        {single_name(name, where): digest_text(each, where) for name, each in given.items()},
        tuple(single_name(name, where) for name in list_of(refers, where)),
    )

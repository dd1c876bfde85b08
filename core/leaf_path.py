"""The text path of a leaf. Imports no torch: commands that read a run need it."""

from collections.abc import Mapping
from typing import Any


def join(prefix: str, kind: type[Any], entry: object) -> str:
    """The path of a child: an attribute after a dot, everything else in brackets."""
    if isinstance(entry, str) and not issubclass(kind, Mapping):
        return f"{prefix}.{entry}" if prefix else entry
    return f"{prefix}[{entry!r}]"

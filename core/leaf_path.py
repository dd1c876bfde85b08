"""The text path of a leaf. Imports no torch: commands that read a run need it."""

import re
from collections.abc import Mapping
from typing import Any, Final

_COMPONENT: Final = re.compile(r"\w*")


def join(prefix: str, kind: type[Any], entry: object) -> str:
    """The path of a child: an attribute after a dot, everything else in brackets."""
    if isinstance(entry, str) and not issubclass(kind, Mapping):
        return f"{prefix}.{entry}" if prefix else entry
    return f"{prefix}[{entry!r}]"


def component_of_leaf(path: str) -> str:
    """The component to which a leaf belongs.

    Examples:
        >>> component_of_leaf("model.params['w']"), component_of_leaf("ema['w']"), component_of_leaf("scale")
        ('model', 'ema', 'scale')
    """
    found = _COMPONENT.match(path)
    return "" if found is None else found[0]

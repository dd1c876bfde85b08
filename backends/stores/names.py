"""Checks the names of files: which ones a store accepts, so that no name leads outside a run."""

import re
from typing import Final

from trainfold.core.errors import CheckpointHostile

_COMPONENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")  # 255 bytes: what filesystems hold
_DEPTH_LIMIT: Final = 2


def is_component(text: str) -> bool:
    """Whether a text can be one component of a name: it has no character with a meaning to a filesystem, a shell or a URL.

    Examples:
        >>> is_component("step-00000120"), is_component(".."), is_component("a/b"), is_component(".tmp")
        (True, False, False, False)
    """
    return _COMPONENT.fullmatch(text) is not None


def split_name(name: str) -> tuple[str, str]:
    """Split a file's name into its directory ("" at the top) and its last component.

    Raises:
        CheckpointHostile: for anything that is not one or two components.

    Examples:
        >>> split_name("step-00000120/manifest.json"), split_name("run.json")
        (('step-00000120', 'manifest.json'), ('', 'run.json'))
    """
    components = name.split("/")
    if not 1 <= len(components) <= _DEPTH_LIMIT or not all(map(is_component, components)):
        raise hostile_name(name)
    return ("", name) if len(components) == 1 else (components[0], components[1])


def prefix_directory(prefix: str) -> str:
    """The directory that a prefix names: "" for the top, ``step-00000120`` or ``step-00000120/`` for one below.

    Raises:
        CheckpointHostile: for anything else.

    Examples:
        >>> prefix_directory("step-00000120/"), prefix_directory("")
        ('step-00000120', '')
    """
    directory = prefix.removesuffix("/")
    if prefix and not is_component(directory):
        raise hostile_name(prefix)
    return directory


def hostile_name(name: str) -> CheckpointHostile:
    """The error for a name that no version of trainfold writes."""
    return CheckpointHostile(
        repr(name[:200]),
        expected="one or two components of A-Z a-z 0-9 . _ -, not starting with a dot",
        found=f"a name of {len(name)} characters that breaks this rule",
        fix="do not trust this checkpoint; if you chose the name, rename it",
    )

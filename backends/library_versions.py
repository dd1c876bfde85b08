"""`library_versions`: what a manifest records of the libraries that are installed. Nothing is imported to know their versions."""

import runpy
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path

_LIBRARIES = ("trainfold", "torch", "numpy")


def library_versions() -> dict[str, str]:
    """The versions that a manifest records, without libraries that are not installed.

    Examples:
        >>> sorted(library_versions())
        ['numpy', 'torch', 'trainfold']
    """
    found = {name: _version(name) for name in _LIBRARIES}
    return {name: version for name, version in found.items() if version is not None}


@cache
def _version(library: str) -> str | None:
    """The version of the running code, read once: another version may be installed while it runs."""
    with suppress(metadata.PackageNotFoundError):
        return _own_version(library) or metadata.version(library)
    return None


def _own_version(library: str) -> str | None:
    """What ``__version__`` of a library says, also if it is not imported; None if that is not known.

    torch names there what it was built for (``2.9.0+cu128``), and in the metadata of its package often not.
    """
    if library == "trainfold":
        return None
    if (module := sys.modules.get(library)) is not None:
        return str(module.__version__)
    spec = util.find_spec(library) if library == "torch" else None
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    return str(runpy.run_path(str(file))["__version__"]) if file is not None and file.is_file() else None

"""`trainfold schema NAME`: the JSON Schemas of what commands print with ``--json``, and of a manifest. They are files of the package."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from trainfold.adapters.cli.terminal.output import Answer, Table, UsageError, deliver

_FOLDER: Final = Path(__file__).parent / "schemas"


def show_schema(name: str | None) -> int:
    """Print a schema, or the names of all.

    Returns:
        The exit code; 2 for a name that no schema has.
    """
    return deliver(lambda: _schema(name), as_json=name is not None)


@cache
def names() -> tuple[str, ...]:
    """The names of all schemas.

    Examples:
        >>> "ls" in names(), "manifest" in names()
        (True, True)
    """
    return tuple(sorted(path.name.removesuffix(".schema.json") for path in _FOLDER.glob("*.schema.json")))


def schema_of(name: str) -> dict[str, Any]:
    """A schema.

    Raises:
        UsageError: for a name that no schema has; the names are listed.
    """
    if name not in names():
        raise UsageError("trainfold schema", expected=f"one of {', '.join(names())}", found=name,
                         fix="see `trainfold schema` for what each describes")  # fmt: skip
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.schema.json").read_bytes())
    return found


def _schema(name: str | None) -> Answer:
    if name is not None:
        return Answer(schema_of(name))
    rows = tuple((each, str(schema_of(each)["title"])) for each in names())
    return Answer({}, (Table("", ("name", "what it describes"), rows),))

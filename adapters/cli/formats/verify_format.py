"""What `trainfold verify` finds out about a path that is not a checkpoint of a run: what fits together, and what cannot be known."""

from pathlib import Path

import attrs
import xxhash

from trainfold.adapters.cli.locate import error_from
from trainfold.adapters.cli.terminal.output import Answer, Table, size_text
from trainfold.adapters.cli.terminal.reading import Advance, reading
from trainfold.backends.convert.hub_checks import hub_problems
from trainfold.backends.convert.opened_source import OpenedSource, open_source
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.backends.weights.opened import opened_weights
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.errors import TrainfoldError
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.layout.slices import whole_box
from trainfold.core.problem import Problem, problem_of

_CHUNK_BYTES = 16 << 20
_NO_DIGESTS = "whether the values are those that were written: this format has no digests"


def verify_format(path: Path, *, key: str | None = None) -> Answer:
    """Check that what is at a path is whole, and read all of it.

    Args:
        path: a file or directory.
        key: under which the model is in what torch has written; None to look for it.

    Returns:
        What was checked, what could not be, and a digest of each file; with the first problem as the error.

    Raises:
        CheckpointError: the matching subclass, if its format is not known.
    """
    opened = open_source(path, key=key)
    files: list[tuple[str, int, str]] = []
    if isinstance(opened.model, HubDirectory):
        problems, found = hub_problems(opened.model)
        checked = "headers, sizes, and that each tensor of the index is in its file, once"
        with reading("verifying", sum(each.stat().st_size for each in found)) as advance:
            files = [(file.name, file.stat().st_size, _digest(file, advance)) for file in found]
    else:
        problems, checked = _read_all(opened), "that each tensor is covered by its parts, and can be read"
    facts = [
        ("format", opened.format),
        ("checked", checked),
        ("not checked", _NO_DIGESTS),
        ("result", "damaged" if problems else "whole"),
    ]
    tables = [Table(str(path), ("", ""), tuple(facts))]
    if files:
        tables.append(
            Table(
                "Files",
                ("file", "size", "digest"),
                tuple((name, size_text(size), digest) for name, size, digest in files),
            )
        )
    if problems:
        tables.append(
            Table(
                "Damaged",
                ("where", "expected", "found"),
                tuple((each.where, each.expected, each.found) for each in problems),
            )
        )
    data = {
        "path": str(path),
        "format": opened.format,
        "verified": not problems,
        "checked": checked,
        "not_checked": _NO_DIGESTS,
        "size_bytes": sum(size for _, size, _ in files),
        "files": [{"name": name, "digest": digest, "status": "verified"} for name, _, digest in files],
        "problems": [attrs.asdict(each) for each in problems],
    }
    return Answer(data, tuple(tables), error_from(problems[0]) if problems else None)


def _digest(file: Path, advance: Advance) -> str:
    whole = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while data := opened.read(_CHUNK_BYTES):
            whole.update(data)
            advance(len(data))
    return DIGEST_PREFIX + whole.hexdigest()


def _read_all(opened: OpenedSource) -> list[Problem]:
    """Read one tensor after the other."""
    problems = []
    with opened_weights(opened.model) as weights:
        total = sum(size_bytes(each.dtype, each.shape) for each in weights.specs.values())
        with reading("verifying", total) as advance:
            for name, each in weights.specs.items():
                try:
                    advance(weights.read(name, whole_box(each.shape)).nbytes)
                except TrainfoldError as error:
                    problems.append(problem_of(error))
    return problems

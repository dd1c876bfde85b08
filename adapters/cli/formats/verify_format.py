"""What `trainfold verify` finds out about a path that is not a checkpoint of a run: what fits together, and what cannot be known."""

from pathlib import Path

import attrs
import xxhash

from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.adapters.cli.terminal.reading import Advance, reading
from trainfold.backends.convert.hub_checks import hub_problems
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.convert.torch_checks import size_to_read, torch_problems
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.printable import bytes_text, printable
from trainfold.core.problem import Problem, error_from

_CHUNK_BYTES = 16 << 20
_NO_DIGESTS = "whether the values are those that were written: this format has no digests"
_OF_TORCH = ("torch", "dcp", "accelerate", "hf")  # a trainer leaves its optimizer beside the files of a hub
_SHOWN = 8


def verify_format(path: Path, *, key: str | None = None) -> Answer:
    """Check that what is at a path is whole, and read all of it.

    Args:
        path: a file or directory.
        key: under which there must be tensors in what torch has written; all of it is read in any case.

    Returns:
        What was checked, what could not be, and a digest of each file; with the first problem as the error.

    Raises:
        CheckpointError: the matching subclass, if its format is not known.
    """
    opened = open_source(path, key=key, whole=key is None)
    files: list[tuple[str, int, str]] = []
    problems: list[Problem] = []
    checked, unknown = [], dict[str, None]()
    if isinstance(opened.model, HubDirectory):
        problems, found = hub_problems(opened.model)
        checked.append("headers, sizes, and that each tensor of the index is in its file, once")
        unknown[_NO_DIGESTS] = None
        with reading("verifying", sum(each.stat().st_size for each in found)) as advance:
            files = [(file.name, file.stat().st_size, _digest(file, advance)) for file in found]
    if opened.format in _OF_TORCH:
        with reading("verifying", size_to_read(path)) as advance:
            archives = torch_problems(path, opened.format, advance=advance)
        problems += archives.problems
        if archives.files:
            checked.append(f"the CRC-32 of all that torch has written to {_some(archives.files)}")
        if archives.without:
            unknown[f"{_some(archives.without)}: written without CRC-32, or not by torch.save"] = None
        elif not isinstance(opened.model, HubDirectory):
            unknown["changes that were made on purpose: a CRC-32 finds damage"] = None
        if opened.format == "dcp":
            unknown["names, dtypes and shapes, which .metadata has without a CRC-32"] = None
    facts = [
        ("format", opened.format),
        *(("checked", each) for each in checked),
        *(("not checked", each) for each in unknown),
        ("result", "damaged" if problems else "whole"),
    ]
    tables = [Table(str(path), ("", ""), tuple(facts))]
    if files:
        tables.append(
            Table(
                "Files",
                ("file", "size", "digest"),
                tuple((name, bytes_text(size), digest) for name, size, digest in files),
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
        "checked": "; ".join(checked),
        "not_checked": "; ".join(unknown),
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


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(printable, names[:_SHOWN]))}{more}"

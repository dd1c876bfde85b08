"""``run.json``: the file that makes a directory a run, as bytes and as the id that it holds."""

from trainfold.core.errors import CheckpointForeign, FutureVersion
from trainfold.core.format.manifest import HEAD_BYTES
from trainfold.core.format.strict_json import hostile, single_name, strict_json
from trainfold.core.json_values import canonical_json, shown

RUN_VERSION = 1
RUN_LIMIT_BYTES = HEAD_BYTES


def run_document(run_id: str) -> bytes:
    """The bytes of ``run.json``.

    Examples:
        >>> run_document("a1")
        b'{"format":"trainfold-run","version":1,"run_id":"a1"}'
    """
    return canonical_json({"format": "trainfold-run", "version": RUN_VERSION, "run_id": run_id})


def run_id_of(data: bytes, where: str, *, size_bytes: int) -> str:
    """The id in a ``run.json``.

    Args:
        data: its bytes, or the first `RUN_LIMIT_BYTES` of them.
        where: the file, for messages.
        size_bytes: the size of the file.

    Raises:
        FutureVersion: if a newer trainfold made the run.
        CheckpointForeign: if another program wrote the file.
        CheckpointHostile: if the file is not what trainfold writes.

    Examples:
        >>> run_id_of(run_document("a1"), "runs/a/run.json", size_bytes=52)
        'a1'
    """
    if size_bytes > RUN_LIMIT_BYTES:
        raise hostile(where, f"at most {RUN_LIMIT_BYTES} bytes", size_bytes)
    document = strict_json(data, where)
    if document.get("format") != "trainfold-run":
        raise CheckpointForeign(where, expected="a trainfold run", found=sorted(document)[:4] or "{}", fix="")
    version = document.get("version")
    if type(version) is int and version > RUN_VERSION:
        raise FutureVersion(where, expected=f"version {RUN_VERSION}", found=version, fix="upgrade trainfold")
    if type(version) is not int or version != RUN_VERSION:
        raise hostile(where, f"version {RUN_VERSION}", shown(version))
    return single_name(document.get("run_id"), where)

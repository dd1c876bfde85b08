"""What `trainfold inspect` shows of a path that is not a checkpoint of a run: its format, and the tensors in it."""

from pathlib import Path

from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.backends.convert.opened_source import has_keys, open_source
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.printable import bytes_text


def inspect_format(path: Path, *, tensors: bool = False, key: str | None = None) -> Answer:
    """Describe what is at a path, from its headers.

    Args:
        path: a file or directory.
        key: under which the model is in what torch has written; None to look for it.
        tensors: whether the tables list every tensor; the JSON always does.

    Raises:
        CheckpointError: the matching subclass, if its format is not known or it cannot be read.
    """
    unclear = None
    try:
        opened = open_source(path, key=key)
    except InvalidArgument as error:
        if key is not None or not has_keys(path):
            raise
        opened, unclear = open_source(path, whole=True), error
    sizes = {name: size_bytes(each.dtype, each.shape) for name, each in opened.model.specs().items()}
    specs = opened.model.specs()
    facts = [
        ("format", opened.format),
        *(("shown by", each) for each in opened.detected.seen),
        *((("model", f"not known: {unclear.found}; {unclear.fix}"),) if unclear is not None else ()),
        ("step", "not known" if opened.step is None else str(opened.step)),
        ("beside the model", ", ".join(opened.others) or "nothing that is known"),
        ("tensors", f"{len(specs)}, {bytes_text(sum(sizes.values()))}"),
        *(("dtype", f"{dtype}: {count}") for dtype, count in _dtypes([each.dtype for each in specs.values()]).items()),
    ]
    rows = tuple((name, each.dtype, str(list(each.shape)), str(sizes[name])) for name, each in specs.items())
    tables = [Table(str(path), ("", ""), tuple(facts))]
    if tensors:
        tables.append(Table("Tensors", ("name", "dtype", "shape", "bytes"), rows))
    data = {
        "path": str(path),
        "format": opened.format,
        "seen": list(opened.detected.seen),
        "step": opened.step,
        "others": list(opened.others),
        "size_bytes": sum(sizes.values()),
        "tensors": [
            {"name": name, "dtype": each.dtype, "shape": list(each.shape), "size_bytes": sizes[name]}
            for name, each in specs.items()
        ],
    }
    return Answer(data, tuple(tables))


def _dtypes(found: list[str]) -> dict[str, int]:
    return {name: found.count(name) for name in sorted(set(found))}

"""`trainfold link SRC DST`: the other format of what a path has, where both have the same files."""

from pathlib import Path

from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.adapters.cli.terminal.reading import reading
from trainfold.backends.convert.conversion_run import like_of
from trainfold.backends.convert.link_hub import link_to_hub, refused
from trainfold.backends.convert.link_native import link_to_run
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.stores.place import free_path, is_object_url
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.core.errors import InvalidArgument
from trainfold.core.printable import bytes_text


def link_path(source: Path, target: Path, *, like: Path | None = None, dry_run: bool = False) -> Answer:
    """Link what is at a path.

    Args:
        source: a checkpoint, a run, a directory of a hub, or a safetensors file.
        target: the path of the other format.
        like: the directory of the original model, or its ``config.json``.
        dry_run: whether nothing is made.

    Raises:
        InvalidArgument: for the URL of a bucket; and if the two formats do not have the same files: the message says why.
        SaveFailed: if the files cannot be linked.
        CheckpointError: the matching subclass, if something cannot be read.
    """
    for name, place in (("source", source), ("target", target)):
        if is_object_url(str(place)):
            raise InvalidArgument(name, expected="a path on a file system that can give a file a second name, which no bucket can", found="the URL of a bucket",
                                  fix="use `trainfold convert`, which copies; or bring the run to a disk with `trainfold copy`, and link there")  # fmt: skip
    opened, path = open_source(source), free_path(str(target), argument="target")
    to = "hf" if opened.checkpoint is not None else "native"
    if opened.checkpoint is not None:
        original, config = like_of(opened, like)
        found = link_to_hub(opened, path, like=original, config=config, dry_run=dry_run)
    elif isinstance(opened.model, HubDirectory):
        with reading("reading", sum(file.stat().st_size for file in opened.model.files())) as advance:
            found = link_to_run(opened, path, dry_run=dry_run, advance=advance)
    else:
        raise refused(str(source), opened.format)
    rows = [(each.name, bytes_text(each.size_bytes), f"linked to {each.source}") for each in found.files]
    rows += [(name, bytes_text(size), "written") for name, size in found.beside.items()]
    data = {
        "source": str(source),
        "source_format": opened.format,
        "target": str(target),
        "to": to,
        "dry_run": dry_run,
        "linked": [{"name": each.name, "source": each.source, "size_bytes": each.size_bytes} for each in found.files],
        "files": [{"name": name, "size_bytes": size} for name, size in found.beside.items()],
    }
    title = f"{'Would be linked' if dry_run else 'Linked'}: {target} ({to})"
    return Answer(data, (Table(title, ("file", "size", "what"), tuple(rows)),))

"""`trainfold files CKPT`: lists the files that belong to a checkpoint, and puts them into a directory."""

from collections.abc import Sequence
from pathlib import Path

from trainfold.adapters.cli.locate import known_names, open_checkpoint
from trainfold.adapters.cli.terminal.output import Answer, Table
from trainfold.core.errors import CheckpointMissing
from trainfold.core.printable import bytes_text
from trainfold.core.side.side_file import files_left_out, side_files_in


def files_of_checkpoint(
    path: Path, *, directory: Path | None = None, components: Sequence[str] | None = None
) -> Answer:
    """List the files, and write them if a directory is given.

    Args:
        path: of the checkpoint, or of a run.
        directory: where they go; None to list them.
        components: of which components; None for all.

    Raises:
        CheckpointMissing: if a directory is given, and there are no files.
        InvalidArgument: if something else is in the directory.
        CheckpointError: the matching subclass, if there is no checkpoint that can be used.
        UnknownComponent: for a name that it does not know.
    """
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    names = known_names(components, (*(each.name for each in manifest.components), *manifest.omitted))
    files = [each for each in side_files_in(manifest, checkpoint.url) if names is None or each.component in names]
    if directory is not None:
        if not files:
            raise CheckpointMissing(checkpoint.url, expected="files that were attached under extra=", found="none", fix="see `trainfold inspect`")  # fmt: skip
        from trainfold.backends.side.checkpoint_files import put_files

        put_files(checkpoint.store, manifest, files, directory)
    left_out = [each for each in files_left_out(manifest) if names is None or each in names]
    data = {
        "checkpoint": checkpoint.url,
        "written": None if directory is None else str(directory),
        "files": [
            {"component": each.component, "name": each.name, "size_bytes": each.size_bytes, "digest": each.digest}
            for each in files
        ],
        "left_out": left_out,
    }
    rows = tuple((each.path, bytes_text(each.size_bytes), each.digest) for each in files)
    rows += tuple((each, "", "not in this checkpoint: it was saved without") for each in left_out)
    title = checkpoint.url if directory is None else f"{checkpoint.url}, written to {directory}"
    return Answer(data, (Table(title, ("file", "size", "digest"), rows),))

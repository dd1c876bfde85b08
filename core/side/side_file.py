"""`SideFile`: a file of the user's in a checkpoint; its bytes are a tensor, so that all that holds for tensors holds for it."""

import ast
import re
from collections.abc import Iterable
from typing import Final, final

import attrs

from trainfold.core.errors import CheckpointHostile, InvalidArgument, TrainfoldError
from trainfold.core.format.manifest import Manifest, TensorRecord
from trainfold.core.json_values import shown

FILES: Final = "files"  # the key of the files in the value of a component
KIND: Final = "SideFiles"  # in the contract, of a component of files
_PATH: Final = re.compile(r"^\w+(?:\.value)+\['files'\]\[(?P<name>(['\"]).*\2)\]$", re.DOTALL)
_NAME_BYTES: Final = 255


@final
@attrs.frozen
class SideFile:
    """A file in a checkpoint.

    Attributes:
        component: under whose name it was attached.
        name: its path, relative, with slashes.
        size_bytes: its size.
        digest: of its bytes.
        record: the tensor that holds them.
    """

    component: str
    name: str
    size_bytes: int
    digest: str
    record: TensorRecord = attrs.field(repr=False)

    @property
    def path(self) -> str:
        """Where it is put, in a directory for the files of all components."""
        return f"{self.component}/{self.name}"


def side_files_in(manifest: Manifest, where: str) -> tuple[SideFile, ...]:
    """The files that a checkpoint holds, in the order of its components.

    Args:
        manifest: its manifest.
        where: the checkpoint, for the message.

    Raises:
        CheckpointHostile: for a name that leads out of a directory, or two of which one is a directory of the other.
    """
    found = [
        SideFile(component.name, name, record.shape[0], record.whole_digest, record)
        for component in manifest.components
        for record in (component.tensors[0] if len(component.nodes) == 1 else ())
        if (name := _name_in(record)) is not None
    ]
    for component in dict.fromkeys(each.component for each in found):
        check_side_names(
            (each.name for each in found if each.component == component),
            f"{where} {component}",
            error=CheckpointHostile,
            fix="do not use this checkpoint",
        )
    return tuple(found)


def files_left_out(manifest: Manifest) -> tuple[str, ...]:
    """The components of files that the run had, and that this checkpoint is without: best effort, with a warning, or not selected.

    Args:
        manifest: of the checkpoint.
    """
    there = {each.name for each in manifest.components}
    kinds = [
        key.split(".") for key, value in manifest.contract.items() if value == KIND and key.startswith("attached.")
    ]
    return tuple(parts[1] for parts in kinds if parts[2:] == ["kind"] and parts[1] not in there)


def check_side_names(
    names: Iterable[str], where: str, *, error: type[TrainfoldError] = InvalidArgument, fix: str | None = None
) -> None:
    """Raise unless names are relative paths with slashes that stay in a directory, and none is a directory of another.

    Args:
        names: the names.
        where: what has them, for the message.
        error: the class to raise.
        fix: the next move; by default, what such names look like.

    Raises:
        InvalidArgument: or ``error``, with the name.

    Examples:
        >>> check_side_names(["tokenizer.json", "1_Pooling/config.json"], "files")
        >>> check_side_names(["../tokenizer.json"], "files")
        Traceback (most recent call last):
            ...
        trainfold.core.errors.InvalidArgument: files: expected a relative path with slashes, without '..', found '../tokenizer.json'; \
name it as it is to be called in the checkpoint, such as 'tokenizer.json'
    """
    fix = fix or "name it as it is to be called in the checkpoint, such as 'tokenizer.json'"
    known = list(names)
    folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in known) for end in range(1, len(parts))}
    for name in known:
        if not _is_confined(name):
            raise error(where, expected="a relative path with slashes, without '..'", found=shown(name), fix=fix)
        if name in folders:
            raise error(where, expected="names of files", found=f"{name}, which is also a directory of others", fix=fix)


def _is_confined(name: str) -> bool:
    parts = name.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return False
    return name.isprintable() and "\\" not in name and all(part not in ("", ".", "..") for part in parts) and max(sizes) <= _NAME_BYTES  # fmt: skip


def _name_in(record: TensorRecord) -> str | None:
    match = _PATH.match(record.path)
    if match is None or record.dtype != "uint8" or len(record.shape) != 1:
        return None
    return str(ast.literal_eval(match["name"]))

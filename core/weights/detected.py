"""`Detected`: the format of a path, and what shows it. `detected_of` decides it from names and first bytes alone; `backends.formats.detect` collects these."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, final

import attrs

from trainfold.core.errors import CheckpointForeign
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, is_data_file, step_of
from trainfold.core.printable import printable

FORMATS: Final[Mapping[str, str]] = {
    "run": "a run of trainfold",
    "checkpoint": "a checkpoint of a run of trainfold",
    "hf": "a directory of safetensors files, as model hubs have them",
    "safetensors": "a safetensors file",
    "dcp": "a directory of torch.distributed.checkpoint",
    "torch": "a file of torch.save",
    "accelerate": "a directory of accelerate's save_state",
}
"""The formats that are known, and what they are called in messages."""

NATIVE: Final = ("run", "checkpoint")
"""Those that trainfold itself writes."""

HEAD_BYTES: Final = 4096
"""What is read of a file, at most."""

INDEX_FILE: Final = "model.safetensors.index.json"
"""Which tensor is in which file of a hub directory."""

READ_HEADS: Final = frozenset({RUN_FILE, MANIFEST})
"""The files of a directory whose first bytes decide."""

_RUN_START: Final = b'{"format":"trainfold-run",'
_MANIFEST_START: Final = b'{"format":"trainfold",'
_LEGACY_START: Final = (
    b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of torch.save, after the two bytes of the pickle's protocol
)
_ZIP_START: Final = b"PK\x03\x04"
_LIGHTNING: Final = b"pytorch-lightning_version"
_SAFETENSORS_HEADER_BYTES: Final = 100_000_000  # as in the reference implementation
_ALONE: Final = re.compile(r"__\d+\.metadata")
_SHARD: Final = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_RANK_PART: Final = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_RANDOM_STATES: Final = re.compile(r"random_states_\d+\.pkl")
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BESIDE: Final = ("config.json", "adapter_config.json", "trainer_state.json")
_SHOWN: Final = 4

Kind: TypeAlias = Literal["file", "link", "directory", "other"]


@final
@attrs.frozen
class NameSeen:
    """One name in a directory.

    Attributes:
        name: its name.
        kind: a link is one to a file; what is neither file nor directory, such as a pipe or a link that leads nowhere, is ``"other"``.
        head: its first bytes, of the files in `READ_HEADS`.
    """

    name: str
    kind: Kind
    head: bytes = b""


@final
@attrs.frozen
class Detected:
    """What a path holds. Prints with what was seen.

    Attributes:
        path: the path.
        formats: the formats that it shows: one, several if it is ambiguous, or none if it is unknown. See `FORMATS`.
        seen: what shows them, or what is there instead.
        fix: what to do if there is not one.

    Examples:
        >>> found = detected_of("models/a", [NameSeen("model.safetensors", "file"), NameSeen("config.json", "file")])
        >>> print(found)
        models/a: a directory of safetensors files, as model hubs have them
          model.safetensors
          config.json
        >>> found.agreed("hf")
        'hf'
    """

    path: str
    formats: tuple[str, ...]
    seen: tuple[str, ...]
    fix: str = ""

    @property
    def format(self) -> str:
        """The one format; else ``"ambiguous"`` or ``"unknown"``."""
        if len(self.formats) == 1:
            return self.formats[0]
        return "ambiguous" if self.formats else "unknown"

    def __str__(self) -> str:
        is_one = len(self.formats) == 1
        what = FORMATS[self.formats[0]] if is_one else f"{self.format}{': ' if self.formats else ''}" + self._names
        return "\n  ".join(printable(each) for each in (f"{self.path}: {what}", *self.seen))

    @property
    def _names(self) -> str:
        return ", and ".join(FORMATS[each] for each in self.formats)

    def agreed(self, asked: str | None = None) -> str:
        """The format to read it as.

        Args:
            asked: the format that it must have: one of `FORMATS`, or ``"native"`` for a run or a checkpoint. None if any will do.

        Returns:
            One of `FORMATS`.

        Raises:
            CheckpointForeign: if it is unknown or another one; if it is ambiguous and ``asked`` does not decide.
        """
        wanted = {None: tuple(FORMATS), "native": NATIVE}.get(asked, (asked,))
        found = [each for each in self.formats if each in wanted]
        if len(found) == 1:
            return found[0]
        expected = f"one of {', '.join(FORMATS)}" if asked is None else f"the format {asked}"
        shown = f"{self._names or 'none that is known'} (seen: {'; '.join(self.seen) or 'nothing'})"
        fix = self.fix if not found and asked is None else "name the format that it has" if self.formats else self.fix
        raise CheckpointForeign(self.path, expected=expected, found=shown, fix=fix or "name another path")


def reader_of(found: Detected) -> str:
    """The source that reads the weights of a format, as a script names it; empty if there is none for a directory of it.

    Examples:
        >>> reader_of(Detected("models/a", ("hf",), ())), reader_of(Detected("runs/a/step-00000007", ("checkpoint",), ()))
        ("trainfold.weights.HubDirectory('models/a')", "trainfold.weights.CheckpointWeights('runs/a', step=7)")
    """
    run, _, name = found.path.rstrip("/").rpartition("/")
    readers = {
        "hf": f"HubDirectory({found.path!r})",
        "dcp": f"DcpDirectory({found.path!r})",
        "safetensors": f"HubDirectory({found.path!r})",
        "torch": f"TorchFile({found.path!r})",
        "accelerate": f"accelerate_training({found.path!r}).model",
        "run": f"CheckpointWeights({found.path!r})",
        "checkpoint": f"CheckpointWeights({run!r}, step={step_of(name)})",
    }
    reader = readers.get(found.format, "")
    return reader and f"trainfold.weights.{reader}"


def detected_of(path: str, entries: Iterable[NameSeen]) -> Detected:
    """The format of a directory.

    Args:
        path: of the directory, for messages.
        entries: what is in it.

    Returns:
        What it is. A sub-directory is not looked into: a run may have an export in one.

    Examples:
        >>> detected_of("a", [NameSeen(".metadata", "file"), NameSeen("__0_0.distcp", "file")]).format
        'dcp'
        >>> print(detected_of("a", [NameSeen("run.json", "link")]))
        a: unknown
          run.json, a link, which is never followed
    """
    table = {each.name: each for each in entries}
    files = [name for name, each in sorted(table.items()) if each.kind in ("file", "link")]
    formats, seen = _own(table)
    for more, shown in (_tensor_files(files, is_checkpoint="checkpoint" in formats), _dcp_files(files)):
        formats += more
        seen += shown
    if formats:
        return Detected(path, tuple(formats), tuple(seen))
    return _unknown(path, table, files, seen)


def _own(table: Mapping[str, NameSeen]) -> tuple[list[str], list[str]]:
    formats, seen = [], []
    for name, start, label in ((RUN_FILE, _RUN_START, "run"), (MANIFEST, _MANIFEST_START, "checkpoint")):
        each = table.get(name)
        if each is not None and each.kind == "file" and each.head.startswith(start):
            formats.append(label)
            seen.append(name)
        elif each is not None:
            seen.append(
                f"{name}, {'a link, which is never followed' if each.kind == 'link' else 'which trainfold did not write'}"
            )
    return formats, seen


def _tensor_files(files: Sequence[str], *, is_checkpoint: bool) -> tuple[list[str], list[str]]:
    tensors = [name for name in files if name.endswith(".safetensors") and not (is_checkpoint and is_data_file(name))]
    shown = [*(name for name in (INDEX_FILE,) if name in files), *([_listed(tensors)] if tensors else [])]
    random = [name for name in files if _RANDOM_STATES.fullmatch(name)]
    if random:
        return ["accelerate"], [_listed(random), *shown]
    if tensors and all(map(_RANK_PART.fullmatch, tensors)):
        return ["dcp"], [f"{_listed(tensors)}: the parts of ranks, as torch's writer for hubs leaves them"]
    if INDEX_FILE in files or _stands_alone(tensors):
        return ["hf"], [*shown, *(name for name in _BESIDE if name in files)]
    return [], [f"{_listed(tensors)}: files of several, without {INDEX_FILE}"] if tensors else []


def _dcp_files(files: Sequence[str]) -> tuple[list[str], list[str]]:
    parts, has_metadata = [name for name in files if name.endswith(".distcp")], ".metadata" in files
    if parts and has_metadata:
        return ["dcp"], [f".metadata, {_listed(parts)}"]
    if parts and (alone := [name for name in files if _ALONE.fullmatch(name)]):
        return [], [
            f"{_listed(alone)}: what each rank has saved for itself, without a .metadata of all: load it with torch on as many ranks, and save it with use_collectives=True"
        ]
    if parts:
        return [], [f"{_listed(parts)} without .metadata: the save did not finish"]
    return [], [".metadata without a .distcp file: the copy is not whole"] if has_metadata else []


def _unknown(path: str, table: Mapping[str, NameSeen], files: Sequence[str], seen: list[str]) -> Detected:
    pickles = [name for name in files if name.endswith(_PICKLES)]
    below = [name for name, each in sorted(table.items()) if each.kind == "directory"]
    fix = "name another path"
    if pickles:
        seen.append(f"{_listed(pickles)}: files of pickles")
        fix = f"name the file itself, such as {pickles[0]}"
    elif below:
        seen.append(f"the directories {_listed(below)}")
        fix = f"name the one that is meant, such as {below[0]}"
    elif not seen:
        seen.append("an empty directory" if not table else f"{_listed(sorted(table))}")
    return Detected(path, (), tuple(seen), fix)


def _stands_alone(tensors: Sequence[str]) -> bool:
    """Whether these files are a directory of a hub without an index: one that is not a part of several, or all of them by their names."""
    parts = [_SHARD.fullmatch(name) for name in tensors]
    if any(part is None and not is_data_file(name) for part, name in zip(parts, tensors, strict=True)):
        return True
    numbers = sorted((int(part[1]), int(part[2])) for part in parts if part)
    return bool(parts) and all(parts) and numbers == [(each + 1, len(parts)) for each in range(len(parts))]


def detected_file(path: str, head: bytes, size_bytes: int) -> Detected:
    r"""The format of a file.

    Args:
        path: of the file, for messages.
        head: its first `HEAD_BYTES`.
        size_bytes: its size.

    Examples:
        >>> detected_file("a", b"\x02\0\0\0\0\0\0\0{}", 10).format
        'safetensors'
        >>> print(detected_file("a.pkl", b"\x80\x04K\x01.", 5))
        a.pkl: unknown
          a pickle that torch.save did not write: it is not read
    """
    length = int.from_bytes(head[:8], "little")  # first: it may begin as a pickle does, or as a zip
    if len(head) > 8 and head[8:9] == b"{" and length <= min(size_bytes - 8, _SAFETENSORS_HEADER_BYTES):
        return Detected(path, ("safetensors",), (f"a JSON header of {length} bytes after its length",))
    if head.startswith(_ZIP_START):
        first = _first_of_zip(head)
        if first.endswith("/data.pkl"):
            lightning = ("of Lightning, by its keys",) if _LIGHTNING in head else ()
            return Detected(path, ("torch",), (f"a zip that begins with {first}", *lightning))
        return Detected(
            path, (), (f"a zip that begins with {first}",), "name a file that torch.save wrote, or a safetensors file"
        )
    if head[:1] == b"\x80":
        if head[2:].startswith(_LEGACY_START):
            return Detected(path, ("torch",), ("the magic number that torch.save wrote before version 1.6",))
        return Detected(
            path,
            (),
            ("a pickle that torch.save did not write: it is not read",),
            "save it with torch.save, or as a safetensors file",
        )
    what = "an empty file" if not size_bytes else f"a file of {size_bytes} bytes that begins with {head[:8]!r}"
    return Detected(path, (), (what,), "name a safetensors file, a file of torch.save, or a directory")


def _first_of_zip(head: bytes) -> str:
    """The name of the first file in a zip."""
    length = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + length].decode("utf-8", "replace")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"

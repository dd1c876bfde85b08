"""`HubFiles`: what a hub directory has beside its weights, such as the tokenizer, as a component of a run."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, final

import torch

from trainfold.backends.formats.staged_directory import staged_directory
from trainfold.backends.side.checkpoint_files import bytes_of_files, files_found
from trainfold.backends.stores.place import local_path
from trainfold.backends.stores.protocol import Store
from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointHostile, InvalidArgument, InvalidState
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Manifest
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.hub.hub_config import HUB_CONFIG, config_of

BESIDE: Final = (
    HUB_CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "*.py", "LICENSE*",
)  # fmt: skip
"""What the original directory has beside its weights that another one of the same model needs: ``*.py`` is code that its configuration may name."""


@final
class HubFiles:
    """What a hub directory has beside its weights: configuration, tokenizer, templates. Attach it under ``extra``, and its bytes are in each checkpoint.

    It comes from where the weights come from: ``manager.restore(live, initial=..., follow=["tokenizer"])`` takes the files of the directory in ``initial``, and a run
    that resumes has those of its checkpoint, whatever ``initial`` is by then.

    Args:
        names: patterns of their names; by default all that a hub directory of the same model needs.

    Attributes:
        source: where they were taken from, in words; empty before.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> files = HubFiles("tokenizer*")
        >>> with tempfile.TemporaryDirectory() as top:
        ...     _ = Path(top, "tokenizer.json").write_text("{}")
        ...     files.take(top)
        >>> files.names
        ('tokenizer.json',)
    """

    def __init__(self, *names: str) -> None:
        self.source = ""
        self._patterns = names or BESIDE
        self._files: dict[str, torch.Tensor] = {}  # as they are saved

    def __repr__(self) -> str:
        return f"HubFiles({', '.join(self._files)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files that it has."""
        return tuple(self._files)

    def take(self, source: str | Path | HubDirectory) -> None:
        """Read the files of a directory, in place of those that it has.

        Args:
            source: the directory.

        Raises:
            InvalidState: if there is no such file.
            CheckpointHostile: for a link that leads out of the directory.
        """
        directory = source if isinstance(source, HubDirectory) else HubDirectory(source)
        found = directory.beside(self._patterns)
        if not found:
            raise InvalidState(
                f"HubFiles of {directory}",
                expected=f"files beside the weights: {', '.join(self._patterns)}",
                found="none",
                fix="name the directory that has them, or other patterns: trainfold.weights.HubFiles(...)",
            )
        self._files = {name: _tensor(data) for name, data in found.items()}
        self.source = repr(directory)

    def has_in(self, directory: HubDirectory) -> bool:
        """Whether a directory has such files."""
        return bool(directory.beside(self._patterns))

    def beside(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of files, by name.

        Args:
            names: patterns, such as ``tokenizer*``. What is not there is left out.
        """
        patterns = tuple(names)
        return {
            name: bytes(tensor_bytes(each))
            for name, each in self._files.items()
            if any(fnmatch(name, pattern) for pattern in patterns)
        }

    def config(self) -> dict[str, Any]:
        """What is in ``config.json``, for `hub_rules_of`.

        Raises:
            InvalidState: if it has none.
            CheckpointDamaged: if it is not one object of JSON.
        """
        found = self._given([HUB_CONFIG])
        return config_of(found[HUB_CONFIG], HUB_CONFIG)

    def write(self, path: str | Path) -> Path:
        """Write the files into a directory, for what reads a tokenizer from one. It is absent until it is whole; one that has these files is left as it is.

        Args:
            path: the directory, which has nothing else.

        Raises:
            InvalidState: if it has no files.
            InvalidArgument: if something else is at the path.
            SaveFailed: if it cannot be written.
        """
        files, place = self._given(["*"]), Path(local_path(path, argument="path"))
        if place.is_dir() and {each.name: each.read_bytes() for each in place.iterdir() if each.is_file()} == files:
            return place
        identity = digest_of("\n".join(f"{name} {digest_of(data)}" for name, data in files.items()).encode())
        sizes = {name: len(data) for name, data in files.items()}
        with staged_directory(place, plan=identity, files=sizes) as staged:
            for name, data in files.items():
                staged.write(name, [data], size_bytes=len(data))
            staged.commit()
        return place

    def state_dict(self) -> dict[str, Any]:
        """Its files, as tensors of bytes, and where they come from."""
        return {"source": self.source, "files": dict(self._files)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the files of a checkpoint.

        Raises:
            CheckpointHostile: for a name that leads out of a directory.
        """
        for name in state["files"]:
            if name != Path(name).name or name in ("", ".", ".."):
                raise CheckpointHostile("HubFiles", expected="names of files", found=name, fix="do not use this checkpoint")  # fmt: skip
        self._files = {name: each.cpu() for name, each in state["files"].items()}
        self.source = state["source"]

    def _given(self, patterns: Iterable[str]) -> dict[str, bytes]:
        found = self.beside(patterns)
        if not found:
            raise InvalidState(
                "HubFiles",
                expected=f"{', '.join(patterns)}, from a directory or a checkpoint",
                found=", ".join(self._files) or "none",
                fix='call manager.restore(live, initial=..., follow=["tokenizer"]) first, or files.take(directory)',
            )
        return found


def hub_files_in(store: Store, manifest: Manifest) -> HubFiles | None:
    """What a checkpoint has for a hub beside its weights: of the component that has a tokenizer, or was attached as `HubFiles`; None if there is none.

    Args:
        store: the run.
        manifest: of the checkpoint.

    Raises:
        InvalidArgument: if several components have it.
    """
    where = f"{store.url}/{directory_of(manifest.head.step)}"
    files = [each for each in files_found(manifest, where, None, may_be_none=True) if _is_beside(each.name)]
    names = {each.component for each in files if fnmatch(each.name, "tokenizer*") or each.record.path.startswith(f"{each.component}.value['files']")}  # fmt: skip
    if len(names) > 1:
        raise InvalidArgument("like", expected=f"one component with a tokenizer in {where}", found=" and ".join(sorted(names)),
                              fix="name the directory of the original model")  # fmt: skip
    if not names:
        return None
    found = HubFiles()
    taken = bytes_of_files(store, manifest, [each for each in files if each.component in names])
    found.load_state_dict({"source": where, "files": {each.name: _tensor(data) for each, data in taken}})
    return found


def _is_beside(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in BESIDE) and "/" not in name


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

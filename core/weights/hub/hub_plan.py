"""`plan_hub_files`: which tensor goes into which file of a hub directory, by size or as in another directory. `HubPlan`: the files, before anything is read."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Final, final

import attrs

from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument, InvalidState
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.json_values import shown
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.weights.hub.file_header import file_header

HUB_INDEX: Final = "model.safetensors.index.json"
_UNITS: Final = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
                 **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}}  # fmt: skip


@final
@attrs.frozen
class HubFile:
    """A file of a hub directory.

    Attributes:
        name: of the file.
        tensors: name -> dtype and shape, in the order of their bytes.
        metadata: texts about the file, in its header.
    """

    name: str
    tensors: Mapping[str, LeafSpec] = attrs.field(repr=lambda each: f"<{len(each)} tensors>")
    metadata: Mapping[str, str] = attrs.field(repr=False)

    @cached_property
    def header(self) -> bytes:
        """What comes before the tensors."""
        return file_header(self.tensors.items(), self.metadata)

    @cached_property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors."""
        few = {id(each): each for each in self.tensors.values()}  # there are many tensors, and few specs
        counts = Counter(map(id, self.tensors.values()))
        return sum(size_bytes(each.dtype, each.shape) * counts[key] for key, each in few.items())

    @property
    def size_bytes(self) -> int:
        """The bytes of the file."""
        return len(self.header) + self.tensor_bytes


@final
@attrs.frozen
class HubPlan:
    """A hub directory before it is written.

    Attributes:
        files: of tensors.
        beside: name -> the bytes of each other file, such as the index and ``config.json``.
        left_out: name of a tensor that is not written -> the reason.
        rules: the transform that made the tensors, as it prints.
    """

    files: tuple[HubFile, ...]
    beside: Mapping[str, bytes] = attrs.field(repr=lambda each: f"{sorted(each)}")
    left_out: Mapping[str, str]
    rules: str = attrs.field(repr=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Name -> size in bytes of each file."""
        return {each.name: each.size_bytes for each in self.files} | {
            name: len(data) for name, data in self.beside.items()
        }

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return sum(self.sizes.values())

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest tensor."""
        return max((size_bytes(each.dtype, each.shape) for file in self.files for each in file.tensors.values()), default=0)  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{each.name}: {len(each.tensors)} tensor{'s' * (len(each.tensors) != 1)}, {each.size_bytes:,} bytes"
            for each in self.files
        ]
        lines += [f"{name}: {len(data):,} bytes" for name, data in self.beside.items()]
        for reason in dict.fromkeys(self.left_out.values()):
            names = [name for name, each in self.left_out.items() if each == reason]
            lines.append(
                f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: left out, {reason}"
            )
        return "\n".join([*lines, *(f"rule: {each}" for each in self.rules.splitlines())])


def shard_size(given: int | str) -> int:
    """Bytes, from a number or a text such as ``"5GB"`` or ``"512MiB"``.

    Raises:
        InvalidArgument: for anything else.

    Examples:
        >>> shard_size("5GB"), shard_size("1MiB"), shard_size(7)
        (5000000000, 1048576, 7)
    """
    fix = 'pass bytes, or a text such as "5GB"'
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given) if isinstance(given, str) else None
    unit = None if found is None else _UNITS.get(found[2].upper() if found[2].upper() != "B" else "")
    if isinstance(given, str) and (found is None or unit is None):
        raise InvalidArgument("shard_bytes", expected="a size", found=shown(given), fix=fix)
    return count("shard_bytes", given if found is None or unit is None else int(float(found[1]) * unit), fix=fix)


def plan_hub_files(  # noqa: PLR0913 - keywords
    specs: Mapping[str, LeafSpec],
    *,
    shard_bytes: int | None = None,
    weight_map: Mapping[str, str] | None = None,
    tied: Collection[str] = (),
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> tuple[HubFile, ...]:
    """Say which tensor goes into which file: each into one.

    Files are filled in the order of the tensors, up to ``shard_bytes``; a tensor that is larger has a file of its own. With a map, each tensor goes into the file that it has there, and one that is not in
    it into the file of the tensor before it.

    Args:
        specs: name -> dtype and shape.
        shard_bytes: of the tensors of a file; None for one file.
        weight_map: name -> file, as the index of another directory has it; None to go by size.
        tied: names that the map may have and ``specs`` has not.
        stem: how the names of files begin, where there is no map.
        metadata: texts for the header of each file.

    Raises:
        InvalidState: if there are no tensors, or some of the map are missing.

    Examples:
        >>> specs = {name: LeafSpec("float32", (size,)) for name, size in (("a", 2), ("b", 1), ("c", 9), ("d", 1))}
        >>> [(each.name, list(each.tensors)) for each in plan_hub_files(specs, shard_bytes=12)]
        [('model-00001-of-00003.safetensors', ['a', 'b']), ('model-00002-of-00003.safetensors', ['c']), ('model-00003-of-00003.safetensors', ['d'])]
    """
    if not specs:
        raise InvalidState("weights", expected="at least one tensor", found="none", fix="see what the rules keep")
    if weight_map is None:
        groups = _by_size(specs, shard_bytes)
        width = len(groups)
        names = [f"{stem}-{number:05d}-of-{width:05d}.safetensors" for number in range(1, width + 1)] if width > 1 else [f"{stem}.safetensors"]  # fmt: skip
        where = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    else:
        where = _by_map(specs, weight_map, tied)
    files: dict[str, dict[str, LeafSpec]] = {file: {} for file in sorted(set(where.values()))}
    # larger elements first, so that every tensor is aligned to its own
    sizes = {id(each): _itemsize(each) for each in specs.values()}
    for size in sorted({*sizes.values()}, reverse=True):
        for name, each in specs.items():
            if sizes[id(each)] == size:
                files[where[name]][name] = each
    return tuple(HubFile(file, tensors, dict(metadata or {})) for file, tensors in files.items())


def hub_index_text(files: Collection[HubFile]) -> bytes:
    """The index of a hub directory: each tensor that is written, with its file.

    Examples:
        >>> print(hub_index_text(plan_hub_files({"w": LeafSpec("float32", (2,))})).decode())
        {
          "metadata": {
            "total_size": 8
          },
          "weight_map": {
            "w": "model.safetensors"
          }
        }
        <BLANKLINE>
    """
    weight_map = {name: file.name for file in files for name in file.tensors}
    total = sum(file.tensor_bytes for file in files)
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()  # fmt: skip


def _itemsize(each: LeafSpec) -> int:
    return STORED[each.dtype].itemsize if each.dtype in STORED else 0


def _by_size(specs: Mapping[str, LeafSpec], shard_bytes: int | None) -> list[list[str]]:
    if shard_bytes is None:
        return [[*specs]]
    groups: list[list[str]] = [[]]
    room = shard_bytes
    sizes = {
        id(each): size_bytes(each.dtype, each.shape) for each in {id(each): each for each in specs.values()}.values()
    }
    for name, each in specs.items():
        size = sizes[id(each)]
        if size > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        room -= size
        groups[-1].append(name)
    return groups


def _by_map(specs: Mapping[str, LeafSpec], weight_map: Mapping[str, str], tied: Collection[str]) -> dict[str, str]:
    missing = [name for name in weight_map if name not in specs and name not in tied]
    if missing or not weight_map:
        raise InvalidState(
            "weights", expected="the tensors of the original directory", found=f"none for {', '.join(missing[:8]) or 'anything'}{' ...' if len(missing) > 8 else ''}",
            fix="pass the rules of the model, as hub_rules_of makes them; or shard_bytes, to go by size and not by the original's map")  # fmt: skip
    where, file = {}, next((weight_map[name] for name in specs if name in weight_map), "")
    if not file:
        file = next(iter(weight_map.values()))
    for name in specs:
        file = where[name] = weight_map.get(name, file)
    return where

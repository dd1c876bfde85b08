"""`torch_problems`: what is not as it was written in a file or a directory of torch, the optimizer and all else beside the model included."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, final

import attrs

from trainfold.backends.formats.dcp.dcp_reader import DcpReader
from trainfold.backends.formats.torch_save.archive import check_sums, is_archive, member_of
from trainfold.backends.formats.torch_save.byte_range import OpenFiles
from trainfold.backends.weights.foreign.torch_file import open_torch_file
from trainfold.core.errors import TrainfoldError
from trainfold.core.problem import Problem, problem_of
from trainfold.core.torch_files.stored_values import StoredTensor, flattened

_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".pkl", ".ckpt"})

Check = Callable[[Callable[[int], None]], bool]
"""Reads something, calls its argument with the number of bytes, and returns whether all of it has sums."""


@final
@attrs.frozen
class TorchChecks:
    """What was found.

    Attributes:
        problems: what is not as it was written.
        files: which files were read.
        without: what has no sums, or is not an archive and was not read.
    """

    problems: list[Problem]
    files: list[str]
    without: list[str]


def torch_problems(path: Path, format_name: str, *, advance: Callable[[int], None] = lambda _: None) -> TorchChecks:
    """Read all that torch has written at a path, and compare it with its sums. Nothing in a pickle is run.

    Args:
        path: of a file of `torch.save`; of a directory of `torch.distributed.checkpoint`; or of another directory, in which files of `torch.save` are looked for.
        format_name: ``torch`` or ``dcp``; anything else for the other directory.
        advance: called with the number of bytes of each piece that was read.

    Raises:
        CheckpointError: the matching subclass, if there is nothing that can be looked through.
    """
    found = TorchChecks([], [], [])
    directory = path if path.is_dir() else path.parent
    with OpenFiles(directory) as files:
        checks: Iterator[tuple[str, Check]]
        if format_name == "dcp":
            checks = _of_dcp(path, files, found)
        else:
            checks = _of_files(path, files, found, has_model=format_name == "torch")
        for name, check in checks:
            try:
                if not check(advance):
                    found.without.append(name)
            except TrainfoldError as error:
                found.problems.append(problem_of(error))
    return found


def size_to_read(path: Path) -> int:
    """About how many bytes `torch_problems` reads."""
    return sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]) if each.is_file())


def _of_dcp(path: Path, files: OpenFiles, found: TorchChecks) -> Iterator[tuple[str, Check]]:
    reader = DcpReader(path)
    metadata = reader.metadata
    places = {name: [(place.file, place.start) for _, place in each.chunks] for name, each in metadata.tensors.items()}
    places |= {name: [(each.file, each.start)] for name, each in metadata.objects.items()}
    found.files.extend(sorted({file for each in places.values() for file, _ in each}))
    for name in sorted(places, key=lambda name: places[name][:1]):
        yield name, lambda advance, name=name: reader.check_values(files, name, advance=advance)  # type: ignore[misc]


def _of_files(path: Path, files: OpenFiles, found: TorchChecks, *, has_model: bool) -> Iterator[tuple[str, Check]]:
    if has_model:
        yield path.name, lambda _: _check_members(path)
    for each in [path] if has_model else sorted(path.iterdir()) if path.is_dir() else []:
        if each.is_file() and is_archive(file := files.whole(each.name)):
            found.files.append(each.name)
            yield each.name, lambda advance, file=file: check_sums(file, advance=advance)  # type: ignore[misc]
        elif each.suffix in _SUFFIXES:
            found.without.append(each.name)


def _check_members(path: Path) -> bool:
    """Whether the memory of each tensor is in the file."""
    with open_torch_file(path) as opened:
        values = opened.values if isinstance(opened.values, dict) else {"": opened.values}
        for each in flattened(values, str(path)).values():
            if type(each) is StoredTensor:
                member_of(opened.file, opened.members, each)
    return True

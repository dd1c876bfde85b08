"""`hub_problems`: what does not fit together in a directory of safetensors files."""

from collections import defaultdict
from pathlib import Path

from trainfold.backends.weights.hub_directory import HubDirectory
from trainfold.core.errors import CheckpointDamaged, TrainfoldError
from trainfold.core.problem import Problem, problem_of


def hub_problems(directory: HubDirectory) -> tuple[list[Problem], list[Path]]:
    """Compare the headers of all files with the index, and with each other.

    Args:
        directory: what is checked.

    Returns:
        What is wrong: a file that is missing or cut off, a tensor that is not where the index says, that is in two files, or that no reader would find;
        and the files that can be read.
    """
    problems: list[Problem] = []
    files: list[Path] = []
    where: dict[str, list[str]] = defaultdict(list)
    try:
        listed = directory.files()
    except TrainfoldError as error:
        return [problem_of(error)], []
    for file, names in listed.items():
        try:
            held = directory.names_in(file)
        except TrainfoldError as error:
            problems.append(problem_of(error))
            continue
        files.append(file)
        for name in held:
            where[name].append(file.name)
        if names is not None:
            problems += [
                _damaged(f"{file}: {name}", "the tensor that the index names", "none")
                for name in names
                if name not in held
            ]
            problems += [
                _damaged(f"{file}: {name}", "each tensor in the index", "one that it does not name")
                for name in held
                if name not in names
            ]
    problems += [
        _damaged(name, "a tensor in one file", " and ".join(each)) for name, each in where.items() if len(each) > 1
    ]
    return problems, files


def _damaged(where: str, expected: str, found: str) -> Problem:
    return problem_of(CheckpointDamaged(where, expected=expected, found=found, fix="download it again"))

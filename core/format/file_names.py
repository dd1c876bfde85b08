"""File names of a run: its checkpoints, their manifests and data files, and the name of a tensor inside its file."""

import re

RUN_FILE = "run.json"

DIRECTORY = re.compile(r"step-(\d{8,18})")
MANIFEST = "manifest.json"
_DATA_FILE = re.compile(r"(\w+-\d{5,}-of-\d{5,}(\.r\d+)?\.safetensors|index-\d{5,}-of-\d{5,}(\.r\d+)?\.json)")


def directory_of(step: int) -> str:
    """The name of the checkpoint of a step.

    Examples:
        >>> directory_of(120)
        'step-00000120'
    """
    return f"step-{step:08d}"


def step_of(directory: str) -> int | None:
    """The step in a directory's name, or None for a foreign name; the whole name has to match.

    Examples:
        >>> step_of("step-00000120"), step_of("step-00000120.bak"), step_of("step-7")
        (120, None, None)
    """
    found = DIRECTORY.fullmatch(directory)
    return int(found[1]) if found and directory_of(int(found[1])) == directory else None


def is_data_file(name: str) -> bool:
    """Whether a save may have written a file of this name.

    Examples:
        >>> is_data_file("model-00000-of-00001.r2.safetensors"), is_data_file("model.safetensors"), is_data_file("manifest.json")
        (True, False, False)
    """
    return _DATA_FILE.fullmatch(name) is not None


def revision_of(name: str) -> int:
    """The revision of its step to which a data file belongs.

    Examples:
        >>> revision_of("model-00000-of-00001.r2.safetensors"), revision_of("model-00000-of-00001.safetensors")
        (2, 0)
    """
    found = _DATA_FILE.fullmatch(name)
    suffix = found and (found[2] or found[3])
    return int(suffix[2:]) if suffix else 0


def can_be_referred_to(directory: str, name: str) -> bool:
    """Whether another checkpoint may refer to a file: a data file with tensors, in the directory of a step.

    Examples:
        >>> can_be_referred_to("step-00000120", "model-00000-of-00001.r2.safetensors"), can_be_referred_to("..", "manifest.json")
        (True, False)
    """
    return step_of(directory) is not None and is_data_file(name) and name.endswith(".safetensors")


def index_name(rank: int, world_size: int, suffix: str = "") -> str:
    """The name of a rank's index.

    Examples:
        >>> index_name(1, 4, ".r2"), is_data_file(index_name(1, 4))
        ('index-00001-of-00004.r2.json', True)
    """
    return f"index-{rank:05d}-of-{world_size:05d}{suffix}.json"

"""The lineage of weights: which source each tensor of a run came from, as its checkpoints record it."""

import re
from collections.abc import Mapping
from typing import Final

from trainfold.core.json_values import Json

_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def lineage_of(sources: Mapping[str, str]) -> Json:
    """The record: pairs of a source and the forms of its names, in which ``*`` stands for a number.

    A name whose form other sources have too stands there itself, so that the record is exact, and as short as a model has kinds of tensors.

    Args:
        sources: tensor -> the source that it came from.

    Examples:
        >>> lineage_of({"layers.0.w": "a", "layers.1.w": "a", "layers.0.b": "b", "layers.1.b": "a"})
        [['a', ['layers.*.w', 'layers.1.b']], ['b', ['layers.0.b']]]
    """
    users: dict[str, set[str]] = {}
    for name, source in sources.items():
        users.setdefault(_form(name), set()).add(source)
    found: dict[str, dict[str, None]] = {}
    for name, source in sources.items():
        form = _form(name)
        found.setdefault(source, {})[form if len(users[form]) == 1 else name] = None
    return [[source, list(forms)] for source, forms in found.items()]


def lineage_source(lineage: Json, name: str) -> str | None:
    """The source that a tensor came from; None if the record does not have it, or is another value.

    Args:
        lineage: as `lineage_of` returns it, from a checkpoint.
        name: of the tensor.

    Examples:
        >>> lineage_source([["a", ["layers.*.w"]]], "layers.7.w")
        'a'
    """
    pairs = [each for each in lineage if isinstance(each, list) and len(each) == 2] if isinstance(lineage, list) else []
    for wanted in (name, _form(name)):
        for source, forms in pairs:
            if isinstance(source, str) and isinstance(forms, list) and wanted in forms:
                return source
    return None


def _form(name: str) -> str:
    return _NUMBER.sub("*", name)

"""`RootFiles`: the data files that a root lists, its own and those of other checkpoints that it refers to, by what indexes say of them."""

from collections.abc import Iterator, Mapping
from typing import Any, final

from trainfold.core.format.manifest import RANK_FILES_VERSION, REFERENCES_VERSION
from trainfold.core.format.strict_json import hostile, int_of, list_of, object_of, single_name, sized, text_of
from trainfold.core.json_values import Json, shown


@final
class RootFiles:
    """The files of a root. A number of a file is its place among all: the own ones first, then the others.

    Args:
        document: the root.
        where: its path, for errors.

    Raises:
        CheckpointHostile: if a rank has two files of its own for a component, or a file of another checkpoint is listed twice.
    """

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self._where = where
        self._own: dict[tuple[str, int], int] = {}
        self._others: dict[tuple[str, str], tuple[int, tuple[str, ...], int]] = {}
        version = document["schema_version"]
        own = list_of(document["files"], where)
        for number, file in enumerate(own):
            components, rank = _writer(file, version, where)
            for key in [(name, rank) for name in components]:
                if key in self._own:
                    wanted = "one file for each component and rank"
                    raise hostile(where, wanted, f"two for {key[0][:40]} and rank {rank}")
                self._own[key] = number
        has_references = version >= REFERENCES_VERSION
        others = list_of(document.get("references"), where) if has_references else []
        for number, file in enumerate(others, len(own)):
            each = object_of(file, where)
            name = text_of(each.get("checkpoint"), where), text_of(each.get("name"), where)
            if name in self._others:
                raise hostile(where, "each file of another checkpoint once", f"{name[0][:40]}/{name[1][:40]} twice")
            self._others[name] = number, *_writer(file, version, where)

    @property
    def writers(self) -> dict[str, set[int]]:
        """Component -> the ranks that have a file of it, here or in another checkpoint."""
        found: dict[str, set[int]] = {}
        others = ((name, rank) for _, names, rank in self._others.values() for name in names)
        for name, rank in (*self._own, *others):
            found.setdefault(name, set()).add(rank)
        return found

    def rows(self, index: Mapping[str, Any], component: str, rank: int) -> Iterator[tuple[int | None, list[Json]]]:
        """The rows of shards in an index, with the number of the file in which each of them lie; None if there is no such file.

        Args:
            index: of the rank.
            component: whose shards they are.
            rank: that wrote the index, and so the files.

        Raises:
            CheckpointHostile: if the index refers to a file that the root does not list for this component and rank.
        """
        yield (
            self._own.get((component, rank)),
            list_of(object_of(index.get("shards"), self._where).get(component, []), self._where),
        )
        groups = object_of(index.get("references", {}), self._where).get(component, [])
        for group in list_of(groups, self._where):
            checkpoint, name, rows = sized(group, 3, self._where)
            key = text_of(checkpoint, self._where), text_of(name, self._where)
            number, components, writer = self._others.get(key, (-1, (), -1))
            if component not in components or writer != rank:
                wanted = f"a file of {component[:40]} and rank {rank} among the references of the root"
                raise hostile(self._where, wanted, shown([*key]))
            yield number, list_of(rows, self._where)


def components_in(file: Mapping[str, Any], version: int, where: str) -> tuple[str, ...]:
    """The components whose tensors a file holds, by its row in a root.

    Raises:
        CheckpointHostile: if the row has none, or one of them twice.

    Examples:
        >>> components_in({"component": "model"}, 3, "m"), components_in({"components": ["model", "ema"]}, 5, "m")
        (('model',), ('model', 'ema'))
    """
    given = list_of(file.get("components"), where) if version >= RANK_FILES_VERSION else [file.get("component")]
    names = tuple(single_name(name, where) for name in given)
    if not names or len({*names}) != len(names):
        raise hostile(where, "the components of a file, each once", shown(given[:8]))
    return names


def _writer(file: Json, version: int, where: str) -> tuple[tuple[str, ...], int]:
    each = object_of(file, where)
    return components_in(each, version, where), int_of(each.get("rank"), where)

"""`RootFiles`: the data files that a root lists, its own and those of other checkpoints that it refers to, by what indexes say of them."""

from collections.abc import Iterator, Mapping
from typing import Any, final

from trainfold.core.format.manifest import REFERENCES_VERSION
from trainfold.core.format.strict_json import hostile, int_of, list_of, object_of, sized, text_of
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
        self._others: dict[tuple[str, str], tuple[int, str, int]] = {}
        own = list_of(document["files"], where)
        for number, file in enumerate(own):
            key = _writer(file, where)
            if key in self._own:
                raise hostile(where, "one file for each component and rank", f"two for {key[0][:40]} and rank {key[1]}")
            self._own[key] = number
        has_references = document["schema_version"] >= REFERENCES_VERSION
        others = list_of(document.get("references"), where) if has_references else []
        for number, file in enumerate(others, len(own)):
            each = object_of(file, where)
            name = text_of(each.get("checkpoint"), where), text_of(each.get("name"), where)
            if name in self._others:
                raise hostile(where, "each file of another checkpoint once", f"{name[0][:40]}/{name[1][:40]} twice")
            self._others[name] = number, *_writer(file, where)

    @property
    def writers(self) -> dict[str, set[int]]:
        """Component -> the ranks that have a file of it, here or in another checkpoint."""
        found: dict[str, set[int]] = {}
        for name, rank in (*self._own, *((name, rank) for _, name, rank in self._others.values())):
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
            number, *writer = self._others.get(key, (-1,))
            if writer != [component, rank]:
                wanted = f"a file of {component[:40]} and rank {rank} among the references of the root"
                raise hostile(self._where, wanted, shown([*key]))
            yield number, list_of(rows, self._where)


def _writer(file: Json, where: str) -> tuple[str, int]:
    each = object_of(file, where)
    return text_of(each.get("component"), where), int_of(each.get("rank"), where)

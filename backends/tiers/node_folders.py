"""`NodeFolders`: the folders of several nodes, each with some files of a run, as one store that is read."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Never, final

from trainfold.backends.formats.native.file_digest import digest_in
from trainfold.backends.runs.scan import examine, read_manifest, read_root, read_run_id
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointError,
    CheckpointForeign,
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    CommitConflict,
    InvalidArgument,
    TrainfoldError,
)
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, revision_of, step_of
from trainfold.core.format.indexes.proved import index_rows
from trainfold.core.format.manifest import FileRecord, IndexRecord
from trainfold.core.format.manifest_reader import opened_root
from trainfold.core.format.strict_json import int_of
from trainfold.core.history.copy_plan import CopiedFile
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.problem import Problem, problem_of


@final
class NodeFolders:
    """The union of some stores, read-only. Of a file that several have, the first counts that has the size in the manifest, and the next one if its bytes prove wrong.

    A file that no manifest names is there if all nodes that have it have the same bytes. A manifest counts if its own digest fits.

    Args:
        nodes: the stores.

    Raises:
        CheckpointMissing: if one of them has nothing.
        CheckpointForeign: if they have files of different runs; or, with the others of its kind, for a run file that trainfold did not write.

    Attributes:
        conflicts: checkpoint -> why it is not known which one is meant: nodes have different manifests of it.
        unlike: files that no manifest names, and that differ between nodes.
        unread: checkpoint -> why no node gives its manifest now, which one of them has.
        later: checkpoint -> what nodes have of it that may be of a later save of that step than the manifest that is taken.
    """

    def __init__(self, nodes: Sequence[Store]) -> None:
        self._nodes = tuple(nodes)
        self.conflicts: dict[str, Problem] = {}
        self.unlike: dict[str, str] = {}
        self.unread: dict[str, Problem] = {}
        self.later: dict[str, str] = {}
        self._known: dict[str, CopiedFile] = {}  # what manifests say of a file
        self._files_of: dict[str, list[CopiedFile]] = {}
        self._chosen: dict[str, Store | None] = {}
        self._opened: set[str] = set()  # those of which all indexes are there
        self._turns: dict[str, int] = {}
        for node in self._nodes:
            if not node.list():
                raise CheckpointMissing(node.url, expected="a folder with files of a run", found="nothing", fix="correct the path")  # fmt: skip
        self._choose_run()
        for name in self.steps():
            self._look_at(name)

    @property
    def url(self) -> str:
        """The locations of the nodes."""
        return " + ".join(node.url for node in self._nodes)

    def steps(self) -> list[str]:
        """The directories of checkpoints that some node has."""
        return sorted({name for node in self._nodes for name in node.list() if step_of(name) is not None})

    def lacking(self, name: str) -> list[str]:
        """What the nodes together lack of a checkpoint, one text for each file; empty if all sizes are there.

        Args:
            name: its directory.
        """
        if self._chosen.get(f"{name}/{MANIFEST}") is None:
            return [f"{MANIFEST}, whole, in any of the folders"]
        lost = [file for file in self._files_of.get(name, []) if not self._having(file.path)]
        found = [f"{file.path.removeprefix(f'{name}/')}{self._instead(file)}" for file in lost]
        return found if not found or name in self._opened else [*found, "and the files that only this index names" if len(found) == 1 else "and the files that only these indexes name"]  # fmt: skip

    def another_for(self, where: str) -> bool:
        """Take a file that proved damaged from the next node that has it; whether there is one.

        Args:
            where: of the error.
        """
        path = where.removeprefix(f"{self.url}/")
        turn, having = self._turns.get(path, 0) + 1, self._having(path) if path in self._known else []
        if path == where or turn >= len(having):
            return False
        self._turns[path] = turn
        return True

    # --- reading, as a store -----------------------------------------------------------------------------------------

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store`."""
        return self._node_of(name).read(name, start=start, stop=stop)

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store`."""
        self._node_of(name).read_into(name, buffer, start=start)

    def size(self, name: str) -> int | None:
        """See `Store`."""
        node = self._first_of(name)
        return None if node is None else _size_in(node, name)

    def committed_at(self, name: str) -> float | None:
        """See `Store`."""
        node = self._first_of(name)
        return None if node is None else node.committed_at(name)

    def list(self, prefix: str = "") -> list[str]:
        """See `Store`. Files that differ between nodes are left out."""
        names = {name for node in self._nodes for name in _list_in(node, prefix)}
        paths = {name: f"{prefix}/{name}" if prefix else name for name in names}
        for path in paths.values():
            self._first_of(path)
        return sorted(name for name, path in paths.items() if path not in self.unlike)

    def pointers(self) -> dict[str, str]:
        """None: what pointers name may lie elsewhere."""
        return {}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _choose_run(self) -> None:
        found = [(node, run_id) for node in self._nodes if (run_id := read_run_id(node)) is not None]
        for node, run_id in found[1:]:
            if run_id != found[0][1]:
                raise CheckpointForeign(node.url, expected=f"files of run {found[0][1]}, as in {found[0][0].url}", found=f"run {run_id}",
                                        fix="name the folders of one run")  # fmt: skip
        self._chosen[RUN_FILE] = found[0][0] if found else None

    def _look_at(self, name: str) -> None:
        path = f"{name}/{MANIFEST}"
        roots: dict[str, tuple[Store, bytes]] = {}
        unusable: list[str] = []
        for node in self._nodes:
            try:
                root = read_root(node, name)
                opened_root(root, f"{node.url}/{path}")
            except CheckpointError as failed:  # a node without it, or with a part of it
                if (found := problem_of(failed)).is_unreadable:
                    self.unread[name] = found
                unusable += [] if isinstance(failed, CheckpointTorn) else [f"{path} in {node.url}"]
            else:
                roots.setdefault(digest_of(root), (node, root))
        if roots:
            self.unread.pop(name, None)
        self._chosen[path] = next((node for node, _ in roots.values()), None)
        if not roots:
            return
        if len(roots) > 1:
            each = " and ".join(f"{digest} in {node.url}" for digest, (node, _) in roots.items())
            error = CommitConflict(path, expected="one manifest of a step", found=each, fix="leave out the folders with the wrong one, or this step")  # fmt: skip
            self.conflicts[name] = problem_of(error)
        ((_, root),) = list(roots.values())[:1]
        revision = 0
        with suppress(TrainfoldError):  # what is wrong with it shows where it is examined
            document = opened_root(root, path)
            revision = int_of(document.get("revision"), path)
            rows = index_rows(document, path) if document.get("indexes") else []
            self._note(name, [IndexRecord(row["name"], row["rank"], row["size_bytes"], row["digest"]) for row in rows])
            for row in rows:
                self._turn_to_digest(f"{name}/{row['name']}")
            manifest = read_manifest(self, name, root=root)
            self._note(name, [*manifest.files, *manifest.indexes])
            self._opened.add(name)
        problem = self._problem_of(name, root)
        while problem is not None and self.another_for(problem.where):  # the header of a file is damaged
            problem = self._problem_of(name, root)
        self._note_later(name, revision, unusable)

    def _note_later(self, name: str, taken: int, unusable: Sequence[str]) -> None:
        found = [*unusable, *(f"{name}/{file} in {node.url}" for node in self._nodes for file in _list_in(node, name) if revision_of(file) > taken)]  # fmt: skip
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            self.later[name] = f"{found[0]}{more} may be of a later save of this step, of which no folder has a manifest that can be used: what is collected may be the earlier one"  # fmt: skip

    def _problem_of(self, name: str, root: bytes) -> Problem | None:
        entry = examine(self, Inventory(self.url, None, (Entry(name, None),)), name, root=root).entry(name)
        return None if entry is None else entry.problem

    def _turn_to_digest(self, path: str) -> None:
        """Take a small file from the node that has the right bytes of it, if one has."""
        file = self._known[path]
        found = [
            turn
            for turn, node in enumerate(self._having(path))
            if digest_in(node, path, file.size_bytes) == file.digest
        ]
        self._turns[path] = found[0] if found else 0

    def _note(self, name: str, records: Sequence[FileRecord | IndexRecord]) -> None:
        files = {each.path(name): CopiedFile(each.path(name), each.size_bytes, each.digest) for each in records}
        self._known |= files
        known = {file.path: file for file in self._files_of.get(name, [])} | files
        self._files_of[name] = list(known.values())

    def _having(self, path: str) -> Sequence[Store]:
        """The nodes that have a file in the size that its manifest gives it."""
        return [node for node in self._nodes if _size_in(node, path) == self._known[path].size_bytes]

    def _instead(self, file: CopiedFile) -> str:
        sizes = [(size, node.url) for node in self._nodes if (size := _size_in(node, file.path)) is not None]
        return "".join(f" ({size} of {file.size_bytes} bytes in {url})" for size, url in sizes)

    def _first_of(self, path: str) -> Store | None:
        """The node from which a file is taken; None if there is none."""
        if path in self._known:
            having = self._having(path)
            return having[self._turns.get(path, 0)] if having else None
        if path not in self._chosen:
            having = [node for node in self._nodes if _size_in(node, path) is not None]
            is_same = len(having) < 2 or len({(size, digest_in(node, path, size)) for node in having if (size := _size_in(node, path)) is not None}) == 1  # fmt: skip
            if not is_same:
                self.unlike[path] = (
                    f"no manifest names it, and it differs in {' and '.join(node.url for node in having)}"
                )
            self._chosen[path] = having[0] if having and is_same else None
        return self._chosen[path]

    def _node_of(self, path: str) -> Store:
        node = self._first_of(path)
        if node is None:
            raise CheckpointMissing(f"{self.url}/{path}", expected="a file in one of the folders", found="none", fix="name the folder of the node that has it")  # fmt: skip
        return node

    def _refuse(self, *_: Any, **__: Any) -> Never:
        """Refused: the folders are only read."""
        raise InvalidArgument(self.url, expected="a store that is written", found="folders that are only read", fix="name one target")  # fmt: skip

    write = commit = delete = point = lock = reserve = _refuse


def _size_in(node: Store, path: str) -> int | None:
    """The size of a file; None for one that is not there, and for a link, which is not followed."""
    try:
        return node.size(path)
    except (CheckpointHostile, CheckpointTorn):
        return None


def _list_in(node: Store, prefix: str) -> list[str]:
    try:
        return node.list(prefix)
    except CheckpointHostile:  # a link in place of the directory
        return []

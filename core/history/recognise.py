"""What is torn and what is foreign: decided from names, sizes and heads. The interpreter looks at the store and asks.

Nothing here is raised: an error is the answer, and None means that nothing is wrong.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Final, final

import attrs

from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointForeign,
    CheckpointMissing,
    CheckpointTorn,
    TrainfoldError,
)
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, directory_of, step_of
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.indexes.proved import OF_ONE_RANK
from trainfold.core.format.manifest import Head, Manifest
from trainfold.core.format.run_file import run_document
from trainfold.core.history.inventory import OLDER, Entry, Inventory
from trainfold.core.problem import Problem, error_from

HEADER_LENGTH_BYTES: Final = 8  # the first bytes of a safetensors file: the length of its header
_OTHER_FORMATS: Final = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin.index.json",
    ".distcp",
    ".pt",
    ".pth",
    ".ckpt",
)
_OLDER: Final = f"{OLDER} of the run"
_NO_PROOF: Final = "this does not prove damage"
_COPIED: Final = f"{_OLDER}; if this is a copy, copy {{}} too, or write the checkpoint again before it is copied, so that it stands alone: trainfold prune RUN --keep-last 0 --flatten"


def no_manifest(where: str) -> CheckpointTorn:
    """The error for a checkpoint without a manifest, which is the record of its commit.

    Args:
        where: the checkpoint's directory.
    """
    return CheckpointTorn(where, expected=MANIFEST, found="none: a save that did not finish", fix=_OLDER)


def gone_checkpoint(run: str, name: str, pointer: str) -> CheckpointMissing:
    """The error for a checkpoint that a pointer names, and that is not there: a resume goes on from an older one.

    Args:
        run: the location.
        name: of the checkpoint.
        pointer: which names it.
    """
    return CheckpointMissing(f"{run}/{name}", expected=f"the checkpoint that the pointer {pointer} names", found="nothing",
                             fix="a resume goes on from what is there: if it was not deleted on purpose, put it back first")  # fmt: skip


def misplaced(head: Head, name: str, run_id: str | None, where: str) -> CheckpointForeign | None:
    """The error for a checkpoint that belongs to another run, or to another step than its directory says.

    Args:
        head: of its manifest.
        name: its directory.
        run_id: of the run that holds it; None if the run file is lost, so that any run's may be there.
        where: for the message.

    Examples:
        >>> misplaced(Head("a1", 7), "step-00000007", "a1", "runs/a/step-00000007")
        >>> print(misplaced(Head("b2", 7), "step-00000007", "a1", "runs/a/step-00000007").found)
        step 7 of run b2
    """
    if head.step == step_of(name) and (run_id is None or head.run_id == run_id):
        return None
    return CheckpointForeign(
        where,
        expected=f"step {step_of(name)} of run {run_id}",
        found=f"step {head.step} of run {head.run_id}",
        fix="it was copied here from elsewhere: move it back",
    )


@final
@attrs.frozen
class FileCheck:
    """What an interpreter looks at to see whether a file of a checkpoint is the one that was written.

    Attributes:
        name: the file.
        size_bytes: what the manifest lists.
        header_bytes: the length of the header, from which other readers find the tensors; None for a file without tensors, and for one of
            another checkpoint, whose first tensor is not known.
        checkpoint: the other checkpoint to which the file belongs; empty for a file of its own.
    """

    name: str
    size_bytes: int
    header_bytes: int | None
    checkpoint: str = ""

    def torn(self, url: str, size_bytes: int | None) -> CheckpointTorn | None:
        """The error for a file that is missing or has another size.

        Args:
            url: the directory of the file, for the message.
            size_bytes: the size that the file has; None if there is no file.
        """
        if size_bytes == self.size_bytes:
            return None
        found = "no such file" if size_bytes is None else f"{size_bytes} bytes"
        why = ", because a later checkpoint refers to this file" if self.checkpoint else ""
        fix = _COPIED.format(self.checkpoint) if self.checkpoint and size_bytes is None else _OLDER
        return CheckpointTorn(f"{url}/{self.name}", expected=f"{self.size_bytes} bytes{why}", found=found, fix=fix)

    def damaged(self, url: str, start: bytes) -> CheckpointDamaged | None:
        """The error for a file whose header has another length.

        Args:
            url: the directory of the file, for the message.
            start: the first `HEADER_LENGTH_BYTES` of the file.
        """
        found = int.from_bytes(start, "little")
        if self.header_bytes in (None, found):
            return None
        expected = f"a header of {self.header_bytes} bytes"
        return CheckpointDamaged(f"{url}/{self.name}", expected=expected, found=f"one of {found}", fix=_OLDER)


def lost_files(url: str, names: Collection[str]) -> CheckpointTorn:
    """The error for a checkpoint of which files are gone.

    Args:
        url: the run.
        names: of these files in it; at least one.
    """
    found = f"{len(names)} files are gone" if len(names) > 1 else "no such file"
    return CheckpointTorn(f"{url}/{min(names)}", expected="the files that its manifest lists", found=found, fix=_OLDER)


def file_checks(manifest: Manifest, needs: Needs | None = None) -> tuple[FileCheck, ...]:
    """The files of a checkpoint, in the order of the manifest, and what each must be like; then the indexes that were not opened.

    Args:
        manifest: of the checkpoint.
        needs: what one of several ranks needs, if they look together: its own files, those of components of which ranks have their own, and
            its share of all. None for all files.
    """
    if (
        needs is not None
        and needs.most_files is not None
        and len(manifest.names) + len(manifest.references) <= needs.most_files
    ):
        needs = None
    opened = manifest.opened
    unopened = [each for each in manifest.indexes if opened is not None and each.rank not in opened]
    own = {each.name for each in manifest.components if each.is_own} - OF_ONE_RANK
    first: dict[int, int] = {}  # file -> where its first tensor starts
    for component in manifest.components:
        for record in itertools.chain.from_iterable(component.tensors):
            for shard in record.shards:
                if shard.start < first.get(shard.file, shard.stop + 1):
                    first[shard.file] = shard.start
    for other in manifest.others:
        first[other.file] = min([first.get(other.file, other.starts[0]), *other.starts])
    files = (
        FileCheck(
            file.name,
            file.size_bytes,
            first[index] - HEADER_LENGTH_BYTES if index in first and manifest.knows_all_of(file) else None,
            file.checkpoint,
        )
        for index, file in enumerate(manifest.files)
        if needs is None
        or (needs.own is not None and not own.isdisjoint(file.components))
        or needs.looks_at(index, file.rank, opened)
    )
    more = (
        FileCheck(each.name, each.size_bytes, None)
        for number, each in enumerate(unopened)
        if needs is None or needs.looks_at(number, each.rank, opened)
    )
    return (*files, *more)


def unread_newest(inventory: Inventory, newest: Head | None) -> TrainfoldError | None:
    """The error for a run of which the newest checkpoint is meant, where one cannot be read now that may be newer than the newest known one.

    Args:
        inventory: the run.
        newest: the head of the newest one that is known; None without one.
    """
    problem = next((entry.problem for entry in inventory.maybe_newer(newest) if entry.problem is not None), None)
    other = (
        "" if newest is None else f": to take another one, name it, such as {inventory.run}/{directory_of(newest.step)}"
    )
    return None if problem is None else error_from(may_be_newest(problem, other))


def may_be_newest(problem: Problem, then: str) -> Problem:
    """The problem of a checkpoint that cannot be read now, with a fix that says why no other one is taken.

    Args:
        problem: its problem.
        then: the rest of that sentence.

    Examples:
        >>> may_be_newest(Problem("CheckpointUnreadable", "runs/a", "bytes", "503", "wait"), ": name another one").fix
        'wait; this does not prove damage; it may be the newest: name another one'
    """
    proof = "" if _NO_PROOF in problem.fix else f"; {_NO_PROOF}"
    return attrs.evolve(problem, fix=f"{problem.fix}{proof}; it may be the newest{then}")


def not_a_place_for_a_run(
    url: str, names: Collection[str], entries: Iterable[Entry], runs: Collection[str]
) -> CheckpointError | None:
    """The error for a directory without a run file in which no run may start; None if one may.

    A directory of logs and configs may become a run. It may not if it holds checkpoints (the run file was lost), is itself a checkpoint, holds
    other runs, or holds weights in another format.

    Args:
        url: the directory.
        names: what is in it.
        entries: its step directories, with the heads of their manifests.
        runs: those of the names that are runs themselves.

    Examples:
        >>> not_a_place_for_a_run("runs/a", ["events.log", "config.yaml"], (), ())
        >>> print(not_a_place_for_a_run("runs", ["a", "b"], (), ["a", "b"]).fix)
        name one of them, such as a
    """
    entries = tuple(entries)
    if any(entry.head is not None for entry in entries):
        return CheckpointForeign(url, expected=RUN_FILE, found="checkpoints without it", fix=run_file_fix(entries))
    if MANIFEST in names:
        return CheckpointForeign(url, expected="a run", found=f"one checkpoint, with its {MANIFEST}",
                                 fix="name the run, which is the folder above it; to choose a step, pass step=, or --step to trainfold plan")  # fmt: skip
    if runs:
        return CheckpointForeign(url, expected="one run", found=f"a folder of {len(runs)}: {list(runs)[:8]}",
                                 fix=f"name one of them, such as {next(iter(runs))}")  # fmt: skip
    others = [name for name in names if name.endswith(_OTHER_FORMATS) or _is_torch_weights(name)]
    if others:
        return CheckpointForeign(url, expected="a trainfold run", found=f"another format: {others[:4]}",
                                 fix="use another folder for the run; load these weights into the model yourself")  # fmt: skip
    return None


def run_file_fix(entries: Iterable[Entry]) -> str:
    """The fix for a lost or damaged run file: a copy of it, or the file that the manifests imply."""
    ids = {entry.head.run_id for entry in entries if entry.head is not None}
    if len(ids) != 1:
        return f"restore {RUN_FILE} from a copy of the run, or save into another folder"
    document = run_document(ids.pop()).decode()
    return f"restore {RUN_FILE} from a copy of the run, or write {document} into it: the id is that of its manifests"


def lost_checkpoint(names: Collection[str], pointers: Mapping[str, str], *, best_file: str) -> str | None:
    """Evidence that a run without a manifest had a committed checkpoint. A first save that was killed leaves none.

    Args:
        names: what the run holds.
        pointers: name -> what it points to.
        best_file: the name of the record of the best, which is written after a commit.

    Examples:
        >>> lost_checkpoint([], {"latest": "step-00000120"}, best_file="best.json"), lost_checkpoint([], {}, best_file="best.json")
        ('latest names step-00000120', None)
    """
    for name, target in sorted(pointers.items(), reverse=True):  # latest before best
        if name in ("latest", "best") and step_of(target) is not None:
            return f"{name} names {target}"
    return f"there is a {best_file}" if best_file in names else None


def _is_torch_weights(name: str) -> bool:
    return name.startswith("pytorch_model") and name.endswith(".bin")

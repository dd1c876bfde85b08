"""`referring`: the plan of a save that refers to what another checkpoint has, instead of writing it again."""

from collections.abc import Mapping

import attrs

from trainfold.core.format.manifest import ShardRecord
from trainfold.core.layout.replica_shares import Piece
from trainfold.core.save.file_layout import FilePlan, plan_file
from trainfold.core.save.reuse.base import Candidate
from trainfold.core.save.save_plan import Reference, SavePlan


def referring(plan: SavePlan, unchanged: Mapping[Candidate, str | None]) -> SavePlan:
    """The plan without the leaves that are the same as before, and with references to where they are.

    Law: what is written and what is referred to are together what the plan writes. With no leaf it is the plan itself.

    Args:
        plan: with the files of one rank.
        unchanged: the leaves -> the digest of all of the leaf, if the rank writes its first elements and other ranks the rest; None for others.
    """
    if not unchanged:
        return plan
    left_out = {each.path for each in unchanged}
    specs = {path: spec for each in plan.components for path, spec in each.tensors.items()}
    files = []
    for file in plan.files:
        pieces = [
            Piece(placed.path, specs[placed.path], placed.box, placed.held)
            for placed in file.tensors
            if placed.path not in left_out
        ]
        if len(pieces) == len(file.tensors):
            files.append(file)
        elif pieces:
            files.append(_laid_out(file, pieces))
    references = [
        Reference(each.path, before, _listed(shard, whole if placed.is_first_of_whole else "" if placed.is_of_whole else None))
        for each, whole in unchanged.items()
        for placed, before, shard in each.parts
    ]  # fmt: skip
    return attrs.evolve(plan, files=tuple(files), references=tuple(references))


def _laid_out(file: FilePlan, pieces: list[Piece]) -> FilePlan:
    held = {file.component_of(piece.path) for piece in pieces}
    components = tuple(name for name in file.components if name in held)
    return plan_file(file.name, components, file.rank, pieces)


def _listed(shard: ShardRecord, whole: str | None) -> ShardRecord:
    """The shard as the new checkpoint lists it; its file is found later."""
    return shard._replace(whole=whole)

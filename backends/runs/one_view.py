"""`list_for_all` and `examine_for_all`: rank 0 reads the run's files and manifests once for all ranks; each rank checks that it sees the same (ADR-0031).

`examined` is for a process alone. This module imports no torch: commands that plan a resume need it.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import attrs

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.runs.scan import examine, index_reader, read_inventory, read_root, sees_root
from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import TrainfoldError, place
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.indexes.proved import compared_by_all, only_own, opened_share
from trainfold.core.format.manifest_reader import opened_root
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.one_view import View, other_lists, other_views, unlisted
from trainfold.core.layout.world import Collectives
from trainfold.core.problem import Problem, problem_of
from trainfold.core.resume.choose import next_to_examine
from trainfold.core.resume.fall_back import RELISTINGS
from trainfold.core.resume.position_checks import with_positions_checked
from trainfold.core.resume.request import ResumeRequest


def list_for_all(store: Store, world: Collectives) -> Inventory:
    """The run as rank 0 lists it, on every rank.

    Raises:
        RanksDisagree: on every rank, if another rank sees checkpoints that rank 0 does not see, not even when it lists the run again.
    """
    for _ in range(RELISTINGS + 1):
        inventory = on_rank_zero(world, partial(read_inventory, store), doing="list the run")
        if world.world_size == 1:
            return inventory
        found = on_all_ranks(world, partial(_unlisted, store, world, inventory), doing="look at the run", is_vote=True)
        error = other_lists(store.url, found)
        if error is None:
            return inventory
    assert error is not None  # or it had returned
    raise error


def examine_for_all(  # noqa: PLR0913 - keywords
    store: Store,
    inventory: Inventory,
    request: ResumeRequest,
    world: Collectives,
    *,
    wanted: Collection[str],
    needs: Needs | None = None,
) -> Inventory:
    """Read the manifests that a request needs, newest first, until one of them satisfies it; every rank calls with the same inventory.

    Args:
        store: the run.
        inventory: from `list_for_all`.
        request: from `resume_request`.
        world: the ranks.
        wanted: the components of the run that resumes, on any rank.
        needs: what this rank needs of a checkpoint; None for everything. If a rank finds a problem, every rank looks at everything.

    Raises:
        RanksDisagree: on every rank, if a rank does not see the manifest that rank 0 has read, or finds something else against it.
    """
    while (name := next_to_examine(inventory, request, wanted)) is not None:
        inventory = _examined(store, inventory, name, world, request=request, needs=needs)
    return inventory


def examined(run: Run, inventory: Inventory, request: ResumeRequest, wanted: Collection[str] = ()) -> Inventory:
    """Read the manifests that a request needs, newest first, until one of them satisfies it.

    Args:
        run: a directory, or a store.
        inventory: from `read_inventory`.
        request: from `resume_request`.
        wanted: the components of the run that resumes.
    """
    store = open_store(run)
    while (name := next_to_examine(inventory, request, wanted)) is not None:
        inventory = examine(store, inventory, name)
    return inventory


def _unlisted(store: Store, world: Collectives, inventory: Inventory) -> tuple[str, ...]:
    return unlisted(inventory, store.list("")) if world.rank else ()


def _examined(  # noqa: PLR0913 - private
    store: Store, inventory: Inventory, name: str, world: Collectives, *, request: ResumeRequest, needs: Needs | None
) -> Inventory:
    """`examine`, with one reading of the root for all ranks."""
    if world.world_size == 1:
        return examine(store, inventory, name)
    root = on_rank_zero(world, partial(_root, store, name), doing="read the manifest")
    if isinstance(root, Problem):
        entry = inventory.entry(name)
        return inventory if entry is None else inventory.with_entry(attrs.evolve(entry, problem=root))
    mine: list[Inventory] = []
    document = _opened(root, f"{store.url}/{name}/{MANIFEST}")
    needs = needs if needs is None or document is None else _with_own(store, name, document, world, needs)

    def look(needs: Needs | None) -> View:
        found = examine(store, inventory, name, root=root, document=document, needs=needs)
        mine.append(with_positions_checked(found, request))
        entry = mine[-1].entry(name)
        return View(not world.rank or sees_root(store, name, root), None if entry is None else entry.problem)

    views = on_all_ranks(world, partial(look, needs), doing="look at the checkpoint")
    if needs is not None and any(view.problem is not None for view in views):  # it may lie where only some ranks look
        views = on_all_ranks(world, partial(look, None), doing="look at all of the checkpoint")
    error = other_views(f"{store.url}/{name}", views)
    if error is not None:
        place(error, step=step_of(name))
        raise error
    return mine[-1]


@without_collecting
def _opened(root: bytes, where: str) -> Mapping[str, Any] | None:
    """The document of a root; None if something is wrong with it, which `examine` says."""
    try:
        return opened_root(root, where)
    except TrainfoldError:
        return None


def _with_own(store: Store, name: str, document: Mapping[str, Any], world: Collectives, needs: Needs) -> Needs:
    """What a rank needs, with what each rank of the save has of its own: each index is opened by one rank, which sends it to the others."""
    names = compared_by_all(document)
    if not names or not document.get("indexes"):
        return needs
    where = f"{store.url}/{name}/{MANIFEST}"
    opened: dict[int, dict[str, Any]] = {}

    def tell() -> dict[int, dict[str, Any]]:
        read = index_reader(store, name)
        opened.update(opened_share(document, where, read, rank=world.rank, world_size=world.world_size))
        return {rank: only_own(index, names) for rank, index in opened.items()}

    told = on_all_ranks(world, without_collecting(tell), doing="read what each rank has of its own")
    return attrs.evolve(needs, own={rank: each for part in told for rank, each in part.items()}, opened=opened)


def _root(store: Store, name: str) -> bytes | Problem:
    try:
        return read_root(store, name)
    except TrainfoldError as error:
        return problem_of(error)

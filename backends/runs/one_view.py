"""`view_for_all` and `examine_for_all`: rank 0 reads the run's files and manifests once for all ranks; each rank checks that it sees the same (ADR-0031).

`examined` and `chosen_in` are for a process alone. This module imports no torch: commands that plan a resume need it.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, final

import attrs

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.ranks.all_ranks import on_all_ranks, on_rank_zero
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.scan import examine, index_reader, listed_run, read_root, sees_root
from trainfold.backends.stores.local import Run, open_store
from trainfold.backends.stores.protocol import Store, glimpse
from trainfold.core.errors import RanksDisagree, TrainfoldError, place
from trainfold.core.format.file_names import MANIFEST, step_of
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.indexes.proved import compared_by_all, only_own, opened_share
from trainfold.core.format.manifest import Manifest
from trainfold.core.format.manifest_reader import opened_root
from trainfold.core.history.inventory import Inventory
from trainfold.core.history.one_view import View, other_lists, other_views, unlisted, with_unread
from trainfold.core.history.quarantine import with_quarantined
from trainfold.core.layout.world import Collectives
from trainfold.core.problem import Problem, problem_of
from trainfold.core.resume.choose import choose, next_to_examine
from trainfold.core.resume.fall_back import RELISTINGS
from trainfold.core.resume.position_checks import with_positions_checked
from trainfold.core.resume.request import ResumeRequest


@final
@attrs.frozen
class RunView:
    """What all ranks know of a run before they plan a resume.

    Attributes:
        listed: the run as rank 0 has listed it.
        known: the checkpoints that are passed over because they are in quarantine, and why.
        inventory: both together, with the manifests that the request needs.
        seen: the run as this rank has looked at it, for the attempt that follows.
    """

    listed: Inventory
    known: Mapping[str, Problem]
    inventory: Inventory
    seen: Store


@final
@attrs.frozen
class _Listed:
    """What rank 0 sends the others in one call: the list, the quarantine, and the manifest that is examined first, or why it cannot be read."""

    inventory: Inventory
    known: Mapping[str, Problem]
    first: str | None = None
    root: bytes | Problem | None = None


def view_for_all(  # noqa: PLR0913 - keywords
    store: Store,
    request: ResumeRequest,
    world: Collectives,
    *,
    wanted: Collection[str],
    needs: Needs | None = None,
    before: RunView | None = None,
) -> RunView:
    """List a run and examine what a request needs of it; every rank calls.

    The ranks compare their lists in the call in which they look at the first checkpoint.

    Args:
        store: the run.
        request: from `resume_request`.
        world: the ranks.
        wanted: the components of the run that resumes, on any rank.
        needs: what this rank needs of a checkpoint; None for everything.
        before: what was known before. If the run still holds the same, nothing is examined. Its quarantine counts, and is not read again
            unless the run could not be listed then.

    Raises:
        RanksDisagree: on every rank, if another rank sees checkpoints that rank 0 does not see, not even when it lists the run again; or as
            `examine_for_all`.
    """
    for _ in range(RELISTINGS + 1):
        seen = store if world.rank else glimpse(store)
        tell = partial(_listed, seen, request, wanted, before, reads_root=world.world_size > 1)
        told = on_rank_zero(world, tell, doing="list the run")
        is_as_before = before is not None and told.inventory == before.listed
        found = with_quarantined(told.inventory, told.known)
        error = None
        if world.world_size > 1:
            found, error = _compared(seen, told, found, world, request=request, needs=needs)
        if error is None:
            if is_as_before and before is not None:
                return before
            roots = {} if told.first is None or told.root is None else {told.first: told.root}
            found = examine_for_all(seen, found, request, world, wanted=wanted, needs=needs, roots=roots)
            return RunView(told.inventory, told.known, found, seen)
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
    roots: Mapping[str, bytes | Problem] | None = None,
) -> Inventory:
    """Read the manifests that a request needs, newest first, until one of them satisfies it; every rank calls with the same inventory.

    Args:
        store: the run.
        inventory: from `view_for_all`.
        request: from `resume_request`.
        world: the ranks.
        wanted: the components of the run that resumes, on any rank.
        needs: what this rank needs of a checkpoint; None for everything. If a rank finds a problem, every rank looks at everything.
        roots: the manifest files that rank 0 has sent already.

    Raises:
        RanksDisagree: on every rank, if a rank does not see the manifest that rank 0 has read, or finds something else against it.
    """
    while (name := next_to_examine(inventory, request, wanted)) is not None:
        root = (roots or {}).get(name)
        inventory = _examined(store, inventory, name, world, request=request, needs=needs, root=root)
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


def chosen_in(store: Store, request: ResumeRequest, wanted: Collection[str] = ()) -> Manifest | tuple[Problem, ...]:
    """The checkpoint of a run that a reader takes, alone: the one that was asked for, or the newest that is not in quarantine; or why there is none.

    Args:
        store: the run.
        request: from `resume_request`.
        wanted: the components that it has to have.
    """
    inventory = listed_run(store)
    if request.step is None and inventory.problem is None:
        inventory = with_quarantined(inventory, quarantined(store))
    return choose(examined(store, inventory, request, wanted), request, wanted)


def _listed(
    store: Store,
    request: ResumeRequest,
    wanted: Collection[str],
    before: RunView | None,
    *,
    reads_root: bool,
) -> _Listed:
    """What rank 0 sends: of a run that is as before, nothing is examined again."""
    inventory = listed_run(store)
    if inventory.problem is not None:  # nothing is loaded, and each further request may wait as long as the first
        return _Listed(inventory, {})
    is_new = before is None or before.listed.problem is not None
    asks = is_new and request.step is None  # a step that is asked for is loaded also out of the quarantine
    known = quarantined(store) if asks else {} if before is None else before.known
    if not reads_root or (before is not None and inventory == before.listed):
        return _Listed(inventory, known)
    first = next_to_examine(with_quarantined(inventory, known), request, wanted)
    return _Listed(inventory, known, first, None if first is None else _root(store, first))


def _compared(  # noqa: PLR0913 - private
    store: Store,
    told: _Listed,
    inventory: Inventory,
    world: Collectives,
    *,
    request: ResumeRequest,
    needs: Needs | None,
) -> tuple[Inventory, RanksDisagree | None]:
    """The inventory with the first checkpoint examined, if that takes no call of its own; and whether another rank sees more than rank 0."""
    document = None
    if told.first is not None and isinstance(told.root, bytes):
        document = _opened(told.root, f"{store.url}/{told.first}/{MANIFEST}")
    if document is None or told.first is None or not isinstance(told.root, bytes) or _has_own(document, needs):
        look = partial(_unlisted, store, world, told.inventory)
        return inventory, other_lists(store.url, on_all_ranks(world, look, doing="look at the run", is_vote=True))
    found, views = _seen(store, inventory, told.first, world, root=told.root, document=document, request=request, needs=needs, listed=told.inventory)  # fmt: skip
    return found, other_lists(store.url, [view.unlisted for view in views])


def _unlisted(store: Store, world: Collectives, inventory: Inventory) -> tuple[str, ...]:
    return unlisted(inventory, store.list("")) if world.rank else ()


def _examined(  # noqa: PLR0913 - private
    store: Store,
    inventory: Inventory,
    name: str,
    world: Collectives,
    *,
    request: ResumeRequest,
    needs: Needs | None,
    root: bytes | Problem | None,
) -> Inventory:
    """`examine`, with one reading of the root for all ranks, unless rank 0 has sent it already."""
    if world.world_size == 1:
        return examine(store, inventory, name)
    root = on_rank_zero(world, partial(_root, store, name), doing="read the manifest") if root is None else root
    if isinstance(root, Problem):
        entry = inventory.entry(name)
        return inventory if entry is None else inventory.with_entry(attrs.evolve(entry, problem=root))
    document = _opened(root, f"{store.url}/{name}/{MANIFEST}")
    if document is not None and needs is not None and _has_own(document, needs):
        needs = _with_own(store, name, document, world, needs)
    return _seen(store, inventory, name, world, root=root, document=document, request=request, needs=needs)[0]


def _seen(  # noqa: PLR0913 - private
    store: Store,
    inventory: Inventory,
    name: str,
    world: Collectives,
    *,
    root: bytes,
    document: Mapping[str, Any] | None,
    request: ResumeRequest,
    needs: Needs | None,
    listed: Inventory | None = None,
) -> tuple[Inventory, list[View]]:
    """Examine a checkpoint on all ranks, and return what each has seen. With ``listed`` they compare their lists first: if these differ, nothing else counts."""
    mine: list[Inventory] = []

    def look(needs: Needs | None) -> View:
        more = () if listed is None else _unlisted(store, world, listed)
        found = examine(store, inventory, name, root=root, document=document, needs=needs)
        mine.append(with_positions_checked(found, request))
        entry = mine[-1].entry(name)
        return View(not world.rank or sees_root(store, name, root), None if entry is None else entry.problem, more)

    views = on_all_ranks(world, partial(look, needs), doing="look at the checkpoint")
    if any(view.unlisted for view in views):
        return inventory, views
    if needs is not None and any(view.problem is not None for view in views):  # it may lie where only some ranks look
        views = on_all_ranks(world, partial(look, None), doing="look at all of the checkpoint")
    error = other_views(f"{store.url}/{name}", views)
    if error is not None:
        place(error, step=step_of(name))
        raise error
    return with_unread(mine[-1], inventory, name, views), views


@without_collecting
def _opened(root: bytes, where: str) -> Mapping[str, Any] | None:
    """The document of a root; None if something is wrong with it, which `examine` says."""
    try:
        return opened_root(root, where)
    except TrainfoldError:
        return None


def _has_own(document: Mapping[str, Any], needs: Needs | None) -> bool:
    """Whether the ranks send each other what each rank of the save has of its own."""
    return bool(needs is not None and compared_by_all(document) and document.get("indexes"))


def _with_own(store: Store, name: str, document: Mapping[str, Any], world: Collectives, needs: Needs) -> Needs:
    """What a rank needs, with what each rank of the save has of its own: each index is opened by one rank, which sends it to the others."""
    names = compared_by_all(document)
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

"""`held_digests`: the digests of what ranks have alike, computed in a thread while the run goes on, through a hold."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import xxhash

from trainfold.backends.hold.hold import Hold
from trainfold.backends.hold.write_watch import LeafName
from trainfold.backends.job import Job
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.layout.replica_row import Digests

_PIECE_BYTES: Final = 2**20

Compared = Mapping[str, Mapping[str, str | LeafName]]
"""Name -> leaf path -> the name of the leaf in a hold, or the text that is compared in its place."""


def to_compare(found: Mapping[str, Mapping[str, Any]], component_of: Mapping[str, str]) -> Compared:
    """What to compare, without the tensors.

    Args:
        found: from `trainfold.backends.runs.alike.replicas.replicated`.
        component_of: the component of each name.
    """
    return {
        name: {path: leaf if isinstance(leaf, str) else (component_of[name], path) for path, leaf in leaves.items()}
        for name, leaves in found.items()
    }


def digests_job(leaves: Compared, hold: Hold) -> Job[Digests]:
    """A job, not started yet, that digests held leaves; the hold is released when it has ended.

    Args:
        leaves: which.
        hold: of them.
    """
    return Job(partial(_held_digests, leaves, hold), name="trainfold-replicas")


def _held_digests(leaves: Compared, hold: Hold) -> Digests:
    """Law: `copies_of` of the level "tensor", of the leaves as they were when they were held.

    Raises:
        SaveFailed: if one of them was written to unannounced before it was read.
    """
    try:
        hold.read_in_order(leaf for each in leaves.values() for leaf in each.values() if not isinstance(leaf, str))
        found = {
            name: {path: leaf if isinstance(leaf, str) else _digest(hold, leaf) for path, leaf in each.items()}
            for name, each in leaves.items()
        }
        hold.check_unchanged()
        return found
    finally:
        hold.release()
        hold.forget()


def _digest(hold: Hold, leaf: LeafName) -> str:
    digest = xxhash.xxh3_128()
    for piece in hold.pieces(leaf, _PIECE_BYTES):
        digest.update(piece)
    return DIGEST_PREFIX + digest.hexdigest()

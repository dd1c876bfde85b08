"""`OpenedIndexes`: opens the indexes of all ranks, by which a page knows the bytes of every tensor; a list opens that of rank 0 alone."""

from collections.abc import Mapping
from functools import partial
from typing import Final, final

import attrs

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.runs.scan import index_reader
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import TrainfoldError
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.manifest import Head, IndexRecord, Manifest
from trainfold.core.format.manifest_reader import check_structures, decode_manifest
from trainfold.core.history.inventory import Inventory, head_order
from trainfold.core.page.sizes import has_all_indexes
from trainfold.core.problem import problem_of

MOST_BYTES: Final = 2**26  # of indexes; these are decoded in about four seconds


@final
class OpenedIndexes:
    """Opens them once for each checkpoint, the newest first, as far as `MOST_BYTES` go; of the others, the manifests say which ranks they are of."""

    def __init__(self) -> None:
        self._known: dict[tuple[Head, tuple[IndexRecord, ...]], Manifest] = {}

    def of(self, store: Store, inventory: Inventory, roots: Mapping[str, bytes]) -> Inventory:
        """The inventory with the whole manifests of the newest checkpoints that `proved` has read.

        Args:
            store: the run.
            inventory: with manifests.
            roots: the contents of their manifest files.
        """
        known, self._known = self._known, {}
        left = MOST_BYTES
        read = [(head_order(each.head), each) for each in inventory.entries if each.head and each.manifest and not each.problem]  # fmt: skip
        for _, entry in sorted(read, key=lambda each: each[0], reverse=True):
            manifest = entry.manifest
            if manifest is None or has_all_indexes(manifest):
                continue
            left -= sum(index.size_bytes for index in manifest.indexes)
            if left < 0:
                break
            key = manifest.head, manifest.indexes
            try:
                self._known[key] = (
                    known[key] if key in known else _whole(store, entry.name, manifest, roots[entry.name])
                )
            except TrainfoldError as error:
                inventory = inventory.with_entry(attrs.evolve(entry, problem=problem_of(error)))
            else:
                inventory = inventory.with_entry(attrs.evolve(entry, manifest=self._known[key]))
        return inventory


@without_collecting
def _whole(store: Store, name: str, manifest: Manifest, root: bytes) -> Manifest:
    """The manifest with all indexes, which are read at the same time."""
    read = index_reader(store, name)
    names = [index.name for index in manifest.indexes]
    found = dict(zip(names, side_by_side([partial(read, each.name, each.size_bytes) for each in manifest.indexes]), strict=True))  # fmt: skip
    where = f"{store.url}/{name}/{MANIFEST}"
    whole = decode_manifest(root, where, read=lambda each, _: found.get(each))
    check_structures(whole, where)
    return whole

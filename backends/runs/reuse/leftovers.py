"""Files that a killed replacement of a step has left beside its checkpoint: of a revision that was not committed, or of the one before."""

from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.protocol import Store
from trainfold.core.errors import CheckpointError
from trainfold.core.format.file_names import is_data_file, revision_of
from trainfold.core.history.inventory import Inventory


def leftovers(store: Store, inventory: Inventory) -> dict[str, dict[str, int]]:
    """The files that no checkpoint needs in the directories of usable checkpoints: directory -> file -> its size.

    Data files of an earlier revision stay while other checkpoints refer to the directory. A file of a later one was never committed, so
    nothing refers to it. The manifest of a checkpoint is read only if names of other revisions are beside it.

    Args:
        store: the run. The caller holds its lock, so no save is under way.
        inventory: of the run.
    """
    found: dict[str, dict[str, int]] = {}
    for entry in inventory.entries:
        if entry.head is None or not entry.is_candidate:
            continue
        revision = entry.head.revision
        odd = [file for file in store.list(entry.name) if is_data_file(file) and revision_of(file) != revision]
        if inventory.refers_to(entry.name):
            odd = [file for file in odd if revision_of(file) > revision or not file.endswith(".safetensors")]
        if not odd:
            continue
        try:
            named = read_manifest(store, entry.name).names
        except CheckpointError:
            continue  # it is damaged, and stays as it is
        gone = {file: store.size(f"{entry.name}/{file}") or 0 for file in odd if file not in named}
        if gone:
            found[entry.name] = gone
    return found

"""`next_checkpoint`: a pure decision from an inventory; saving a step again overwrites no existing file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainfold
from trainfold.backends.runs.begin import begin_checkpoint
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointUnreadable, SaveFailed
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.history.next_checkpoint import next_checkpoint, next_head
from trainfold.core.state.state import Progress, TrainState

STEP = "step-00000007"


def file_name(revision):
    return f"model-00000-of-00001{f'.r{revision}' if revision else ''}.safetensors"


@given(
    revisions=st.lists(st.integers(0, 30), max_size=3),
    known=st.none() | st.integers(0, 30),
    has_manifest=st.booleans(),
)
def test_the_revision_is_new_wherever_a_manifest_stands_there(revisions, known, has_manifest):
    """C08: the old checkpoint stays whole until the new manifest replaces it."""
    head = None if known is None else Head("r", 7, revision=known)
    run = Inventory("runs/a", "r", (Entry(STEP, head),))
    files = [*map(file_name, revisions), *(["manifest.json"] if has_manifest else [])]
    found = next_checkpoint(run, "r", 7, files=files)
    if not has_manifest:
        assert found == next_head(run, "r", 7)
    elif known is not None:
        assert found.revision == known + 1
    else:
        assert file_name(found.revision) not in files
        assert found.revision >= 1


def test_a_run_that_cannot_be_listed_gets_no_checkpoint():
    """C15: its timelines are unknown; a head for an empty run would fork them."""

    class Unlisted(MemoryStore):
        is_broken = False

        def list(self, name=""):
            if self.is_broken:
                raise CheckpointUnreadable(self.url, expected="a directory", found="EIO", fix="look at the device")
            return super().list(name)

    store = Unlisted()
    trainfold.save(TrainState(trainer=Progress(9)), store)
    store.is_broken = True
    with pytest.raises(SaveFailed, match="EIO; look at the device"):
        begin_checkpoint(store, 7)

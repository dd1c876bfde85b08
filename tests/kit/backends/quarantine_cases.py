"""Helpers shared by the tests of quarantine."""

import json

import pytest

from trainfold.backends.runs.api import save
from trainfold.backends.runs.quarantine_file import (
    begin_attempt,
    quarantined,
)
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.digest import digest_of
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.inventory import lineage
from trainfold.core.history.quarantine import (
    LIMIT,
    Attempts,
    LoadOutcome,
    after_attempt,
    after_outcome,
    with_quarantined,
)
from trainfold.core.state.state import Progress, TrainState

SEVEN, EIGHT = directory_of(7), directory_of(8)


DAMAGED = LoadOutcome("damaged", "a digest differs")


def save_at(store, *steps):
    for step in steps:
        save(TrainState(trainer=Progress(step=step)), store)


def usable(store, *, limit=LIMIT):
    """What a resume would take, in its order."""
    return [entry.name for entry in lineage(with_quarantined(read_inventory(store), quarantined(store, limit=limit)))]


def die(store, name, *, times=LIMIT):
    for _ in range(times):
        begin_attempt(store, name)


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "run")
    save_at(made, 7, 8)
    return made


# --- the law ---------------------------------------------------------------------------------------------------------


SOME = after_outcome(after_attempt(Attempts(), SEVEN, digest_of(b"7")), SEVEN, digest_of(b"7"), DAMAGED)


def sealed(document):
    """A document with the digest that fits it."""
    covered = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return covered + b',\n"digest":"' + digest_of(covered).encode() + b'"}\n'


def document(**changes):
    record = {"checkpoint": SEVEN, "digest": digest_of(b""), "attempts": 1, "is_damaged": False, "reasons": []}
    record |= changes.pop("record", {})
    return {"format": "trainfold-quarantine", "version": 1, "attempts": [record], **changes}

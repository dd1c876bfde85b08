"""Which checkpoint of a run is opened for a conversion."""

import shutil

import pytest
from kit.backends.runs_cases import state_at

from trainfold.backends.convert import opened_source
from trainfold.backends.convert.opened_source import open_source
from trainfold.backends.runs.api import save
from trainfold.backends.stores.local import LocalStore
from trainfold.core.errors import CheckpointUnreadable


class Denied(LocalStore):
    """A disk that does not give the manifests of some steps now."""

    steps = frozenset()

    def read(self, name, *, start=0, stop=None):
        if name in {f"step-{step:08d}/manifest.json" for step in self.steps}:
            raise CheckpointUnreadable(name, expected="a file that can be read", found="EACCES", fix="wait")
        return super().read(name, start=start, stop=stop)


@pytest.fixture
def run(tmp_path, monkeypatch):
    for step in (2, 4, 6):
        save(state_at(step), tmp_path / "run")
    monkeypatch.setattr(opened_source, "LocalStore", Denied)
    return tmp_path / "run"


def test_an_older_checkpoint_of_a_run_is_not_converted_where_one_cannot_be_read_that_may_be_the_newest(
    run, monkeypatch
):
    """E01: `convert` and `link` took the one before it without a word."""
    monkeypatch.setattr(Denied, "steps", {6})
    with pytest.raises(
        CheckpointUnreadable, match=r"it may be the newest: to take another one, name it, such as .*/step-00000004"
    ):
        open_source(run)
    assert open_source(run / "step-00000004").step == 4
    shutil.rmtree(run / "step-00000006")
    assert open_source(run).step == 4
    monkeypatch.setattr(Denied, "steps", {2, 4})
    with pytest.raises(CheckpointUnreadable, match="EACCES"):
        open_source(run)


def test_an_old_one_that_cannot_be_read_stops_no_conversion(run, monkeypatch):
    """E01."""
    monkeypatch.setattr(Denied, "steps", {2})
    assert open_source(run).step == 6

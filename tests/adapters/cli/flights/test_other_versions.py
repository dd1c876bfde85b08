"""Two runs of which one was made by another version of a library: what differs is listed, and may be the cause of all that differs."""

import pytest
from kit.adapters.cli_cases import fits_its_schema
from kit.adapters.manager.parting_cases import BACKWARDS, sum_backwards, train

from trainfold.adapters.cli.flights import replay_run
from trainfold.adapters.cli.flights.bisect_runs import bisect_runs
from trainfold.adapters.cli.flights.read_run import read_run
from trainfold.adapters.cli.flights.scratch_run import ScratchRun
from trainfold.backends.library_versions import library_versions
from trainfold.backends.runs import save


@pytest.mark.parametrize(
    ("planted", "cause"), [({"at_four": sum_backwards}, "environment"), ({"swaps": True}, "batch")]
)
def test_another_version_of_torch_is_listed_and_never_excluded(tmp_path, monkeypatch, planted, cause):
    """It was not looked at: only results differed, by another kernel of the same environment; and another order of the same seed was another batch, certain."""
    train(tmp_path / "a")
    monkeypatch.setattr(save, "library_versions", lambda: {**library_versions(), "torch": "2.0.0"})
    train(tmp_path / "b", **planted)
    BACKWARDS.clear()
    found = bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "replay", patience_secs=60).data
    fits_its_schema("bisect", found)
    assert found["environment"] == [{"name": "versions.torch", "a": library_versions()["torch"], "b": "2.0.0"}]
    assert found["cause"] == cause, found["text"]
    assert "environment" in (cause, *found["may_be"])


@pytest.mark.parametrize("planted", [{"at_four": sum_backwards}, {}])
def test_a_replay_that_differs_says_in_which_versions_it_was_not_like_its_run(tmp_path, monkeypatch, planted):
    train(tmp_path / "a")
    monkeypatch.setattr(save, "library_versions", lambda: {**library_versions(), "torch": "2.0.0"})
    train(tmp_path / "again", **planted)
    BACKWARDS.clear()
    monkeypatch.setattr(
        replay_run, "replay_program", lambda *_: ScratchRun(read_run(tmp_path / "again"), None, tmp_path)
    )
    asked = {"begin": 3, "end": 9, "until_nonfinite": False, "directory": tmp_path / "replay", "patience_secs": 60}
    found = replay_run.replay_run(tmp_path / "a", ("true",), **asked).data
    fits_its_schema("replay", found)
    said = f"the run was run again in another environment, so that another result says nothing: versions.torch 2.0.0, not {library_versions()['torch']}"
    assert (found["same"], found["warnings"]) == (not planted, [said] if planted else [])

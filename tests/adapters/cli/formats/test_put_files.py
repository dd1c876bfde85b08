"""`trainfold files`: lists the files that belong to a checkpoint, and puts them into a directory."""

import pytest
from kit.adapters import cli_cases

from trainfold.backends.runs.api import save
from trainfold.backends.side.side_files import SideFiles
from trainfold.core.state.state import Progress, TrainState

call = cli_cases.call
answered = cli_cases.answered


@pytest.fixture
def run(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    for step, files in ((1, {}), (2, {"words": SideFiles(tmp_path / "words").capture()})):
        save(TrainState(trainer=Progress(step=step), extra=files), tmp_path / "run")
    return tmp_path / "run"


def test_files_are_listed_and_put_into_a_directory(run, answered, call, tmp_path):
    """C13, R03."""
    found, _ = answered("files", run)
    (file,) = found.pop("files")
    assert found == {"checkpoint": f"{run}/step-00000002", "written": None, "left_out": []}
    assert file.pop("digest").startswith("xxh3:")
    assert file == {"component": "words", "name": "tokenizer.json", "size_bytes": 2}
    out = tmp_path / "out"
    assert answered("files", run, "-o", out, "--components", "words")[0]["written"] == str(out)
    assert (out / "words" / "tokenizer.json").read_text() == "{}"
    assert "words/tokenizer.json" in call("files", run, "--output", out)[0]
    (out / "more").write_text("")
    answered("files", run, "-o", out, code=2)
    assert answered("files", run / "step-00000001")[0]["files"] == []
    answered("files", run / "step-00000001", "-o", tmp_path / "none", code=11)
    assert not (tmp_path / "none").exists()

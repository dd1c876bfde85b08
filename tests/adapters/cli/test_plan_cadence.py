"""`trainfold plan` with the costs of a run advises how often to save."""

import json

import attrs
import pytest

from trainfold.adapters.cli import main
from trainfold.backends.runs.api import save
from trainfold.core.save.cadence import advise_cadence
from trainfold.core.state.state import Progress, TrainState

COSTS = ["--mtbf", "12h", "--save", "200ms", "--step-time", "0.5s"]


def test_the_command_line_gives_the_advice_beside_the_plan(tmp_path, capsys):
    save(TrainState(trainer=Progress(step=10)), tmp_path / "run")
    assert main(["plan", str(tmp_path / "run"), *COSTS]) == 0
    told = capsys.readouterr().out
    assert "resumes from  step-00000010" in told
    assert "\nSave every 263 steps\n" in told
    assert "\n263    132 s     0.304%     loses least\n" in told
    assert main(["plan", str(tmp_path / "run"), *COSTS, "--write", "10m", "--restart", "1m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    advice = advise_cadence(mtbf_secs=43200, save_secs=0.2, step_secs=0.5, write_secs=600, restart_secs=60)
    assert found["cadence"] == json.loads(json.dumps(attrs.asdict(advice)))
    assert found["checkpoint"] == "step-00000010"
    assert main(["plan", str(tmp_path / "run"), "--json"]) == 0
    assert "cadence" not in json.loads(capsys.readouterr().out)


def test_the_advice_is_given_also_where_there_is_nothing_to_resume(tmp_path, capsys):
    save(TrainState(trainer=Progress(step=10)), tmp_path / "run")
    (tmp_path / "run" / "step-00000010" / "manifest.json").unlink()
    for run, error in (("run", "RunDamaged"), ("not-yet", "CheckpointMissing")):
        assert main(["plan", str(tmp_path / run), *COSTS]) >= 10
        out, err = capsys.readouterr()
        assert "Save every 263 steps" in out
        assert err.startswith(error)
        assert main(["plan", str(tmp_path / run), *COSTS, "--json"]) >= 10
        found = json.loads(capsys.readouterr().out)
        assert (found["cadence"]["every_steps"], found["error"]["kind"]) == (263, error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mtbf", "12h"], "no --save, --step-time"),
        (["--write", "0s"], "no --mtbf, --save, --step-time"),
        ([*COSTS[:5], "0s"], "--step-time"),
        ([*COSTS[:5], "2"], "not a duration with a unit"),
        ([*COSTS[:5], "-2s"], "--step-time"),
        ([*COSTS[:5], "nans"], "not a duration with a unit"),
    ],
)
def test_options_that_make_no_advice_are_a_usage_error_before_the_run_is_looked_at(options, words, tmp_path, capsys):
    assert main(["plan", str(tmp_path / "nothing"), *options]) == 2
    assert words in capsys.readouterr().err

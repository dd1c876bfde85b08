"""Replay and bisect of a run that went back: the checkpoints that it left behind are not the run."""

import subprocess

import pytest
from kit.adapters.cli_cases import fits_its_schema
from kit.adapters.manager import replay_cases
from kit.adapters.manager.parting_cases import flip_a_bit, train

from trainfold.adapters.cli.flights.bisect_runs import bisect_runs

ran = replay_cases.ran
replayed = replay_cases.replayed
BACK = (
    'CheckpointManager("runs/mine", every=1000)\nmanager.restore(live)',
    'CheckpointManager(sys.argv[1], every=int(os.environ.get("EVERY", "4")), record=4)\nmanager.restore(live, step=int(os.environ["BACK"]) if "BACK" in os.environ else None)',
)
SPIKES = ("    h = self.first(x)", "    if os.environ.get('SPIKES') and live.progress.step == 12: x = x / 0\n        h = self.first(x)")  # fmt: skip


@pytest.fixture
def rewound(ran, replayed, tmp_path, monkeypatch):
    """Replays a run with checkpoints 4, 8 and 12 that went back to 8, and then saved 14 and 15."""
    monkeypatch.setattr(replay_cases, "RECORDS", BACK)
    command = ran("b", SPIKES)
    text = (tmp_path / "b.py").read_text().replace("epochs=2", "epochs=3")
    (tmp_path / "b.py").write_text(text)
    text = text.replace("manager.should_stop", "live.progress.step == 15").replace("manager.close", "manager.finish(live); manager.close")  # fmt: skip
    (tmp_path / "back.py").write_text(text)
    monkeypatch.setenv("EVERY", "7")
    monkeypatch.setenv("BACK", "8")
    subprocess.run([*command[:-2], "back.py", command[-1]], check=True)
    monkeypatch.delenv("BACK")
    return lambda *words: replayed("replay", "runs/b", *words, command=command)


def test_what_a_rewind_left_behind_does_not_count_in_bisect(tmp_path):
    """A spike after step 4, from which the run went back to step 3: it did the same as the other one, and its log is its own."""
    train(tmp_path / "a", every=1)
    train(tmp_path / "b", at_four=flip_a_bit, steps=6)
    train(tmp_path / "b", begin=3, every=4)
    answer = bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "scratch", patience_secs=60)
    assert (answer.data["cause"], answer.data["warnings"]) == ("nothing", []), answer.data["text"]
    assert answer.data["same_at"] == 8


def test_a_replay_begins_at_a_checkpoint_of_the_run_and_not_at_one_that_was_left_behind(rewound, monkeypatch):
    """Of what came after that, nothing is recorded: it is looked at only for a NaN, before which the run may have gone back."""
    code, found = rewound("--to", 14)
    assert (code, found["from"], found["same"], found["steps"]) == (0, 8, True, 6), found
    code, found = rewound("--from", 12, "--to", 14)
    assert code == found["error"]["exit_code"] == 11
    assert "left behind by the run" in found["error"]["found"]
    assert "such as 14, 15, 8, 4" in found["error"]["fix"]
    assert "--until-nonfinite" in found["error"]["fix"]
    monkeypatch.setenv("SPIKES", "yes")
    code, found = rewound("--from", 12, "--to", 14, "--until-nonfinite")
    assert (code, found["nonfinite"]["step"], found["nonfinite"]["output"]["module"]) == (0, 13, "first")


@pytest.mark.long
def test_what_follows_a_checkpoint_that_was_left_behind_is_compared_with_nothing(rewound):
    code, found = rewound("--from", 12, "--to", 14, "--until-nonfinite")
    fits_its_schema("replay", found)
    assert (code, found["same"], found["steps"], found["reached"]) == (0, None, 0, 14)
    assert "step 12 was left behind by the run" in found["warnings"][0]


def test_steps_that_a_resume_without_a_log_has_undone_are_not_the_run(tmp_path):
    """R04: a process that recorded was killed after step 5, and one that records nothing went on from step 3."""
    train(tmp_path / "a")
    train(tmp_path / "b", at_four=flip_a_bit, steps=5)
    train(tmp_path / "b", is_logged=False)
    answer = bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "scratch", patience_secs=60)
    assert (answer.data["cause"], answer.data["same_at"]) == ("nothing", 9), answer.data["text"]
    assert ["ends at step 5" in answer.data["warnings"][0], "steps 4 to 5 are not used" in answer.data["warnings"][1]] == [True, True]  # fmt: skip

"""A program that records into a bucket and is killed there: its log, its page, replay and bisect, as whole commands over a real S3 server."""

import json
import os
import re
import subprocess
import sys

import pytest
from kit.adapters.manager import replay_cases
from kit.backends.buckets.s3_cases import S3Server, settings_at
from kit.system.rehearse_cases import program

from trainfold.adapters.cli import main
from trainfold.states import read_flights

pytestmark = [pytest.mark.slow(30), pytest.mark.long]

replayed = replay_cases.replayed
DIES = ("    manager.step(live)", "    manager.step(live)\n    if live.progress.step == int(os.environ.get('DIES', 0)): manager.drain(); os.kill(os.getpid(), 9)")  # fmt: skip


@pytest.fixture
def bucket(monkeypatch):
    server = S3Server()
    for name, value in settings_at(server.port).items():
        monkeypatch.setenv(name, value)
    yield "s3://bucket/runs"
    server.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_run_in_a_bucket_is_shown_replayed_and_compared_as_one_on_a_disk(
    bucket, replayed, tmp_path, monkeypatch, capsys, mode
):
    """R04, W22, C13: SIGKILL between two saves; no step is missing or twice, and the kill and what it cost is on the page."""
    monkeypatch.chdir(tmp_path)
    records = (replay_cases.RECORDS[0], replay_cases.RECORDS[1].replace("record=4", f"record=4, mode='{mode}'"))
    (tmp_path / "a.py").write_text(program(records, replay_cases.TWICE, DIES))
    command = [sys.executable, "a.py"]
    for run, dies in ((f"{bucket}/a", 6), (f"{bucket}/a", 0), (f"{bucket}/b", 0), ("disk", 0)):
        code = subprocess.run([*command, run], env={**os.environ, "DIES": str(dies)}, check=False).returncode
        assert code == (-9 if dies else 0)
    logs = [read_flights(run)[0] for run in (f"{bucket}/a", f"{bucket}/b", "disk")]
    assert list(logs[0].steps) == [*range(1, 13)]
    assert logs[0] == logs[1] == logs[2]
    assert main(["page", f"{bucket}/a", "-o", "run.html"]) == 0
    capsys.readouterr()
    shown = re.sub(r"<[^>]*>", "\n", (tmp_path / "run.html").read_text())
    assert "killed, or died without a word" in shown
    assert re.search(r"at least \d+ step|an unknown number of steps", shown), (
        "of the log of the killed process a part is in the bucket"
    )
    code, found = replayed("replay", f"{bucket}/a", "--from", 4, "--to", 8, command=[*command, f"{bucket}/a"])
    assert (code, found["same"], found["steps"]) == (0, True, 4)
    assert found["states"]["same"]
    code, found = replayed("bisect", f"{bucket}/a", "disk")
    assert (code, found["step"]) == (0, None), json.dumps(found)

"""`trainfold replay`: a program goes on from a checkpoint of its run, in a scratch directory, and each step is compared."""

import os
import shutil
import sys
import time

import pytest
from kit.adapters.cli_cases import fits_its_schema, flip
from kit.adapters.manager import replay_cases

from trainfold.adapters.cli import main

ran = replay_cases.ran
replayed = replay_cases.replayed
BATCH = ("    loss.backward()", "    if live.progress.step == 6: loss = loss * 1.001\n    loss.backward()")


def contents(run):
    return {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink()}


def test_a_program_is_replayed_from_a_checkpoint_and_its_run_is_only_read(ran, replayed, tmp_path):
    """Where the program names the run, the replay saves beside it; where it names {run}, there."""
    command = ran("a")
    before = contents(tmp_path / "runs/a")
    code, found = replayed("replay", "runs/a", "--from", 4, "--to", 8, command=command)
    fits_its_schema("replay", found)
    assert (code, found["same"], found["steps"], found["difference"]) == (0, True, 4, None)
    assert found["states"]["same"]
    assert found["warnings"] == []
    assert contents(tmp_path / "runs/a") == before
    flip(tmp_path / "runs/a/flight-00000.log", 9)
    before = contents(tmp_path / "runs/a")
    code, found = replayed("replay", "runs/a", "--from", 0, command=[*command[:-1], "{run}"])
    assert (code, found["same"], found["steps"], found["to"]) == (0, True, 11, 12)
    assert "1 line cannot be read, at byte 0" in found["warnings"][0]
    assert contents(tmp_path / "runs/a") == before


@pytest.mark.parametrize("uses_it", [False, True])
def test_streams_that_a_program_does_not_seed_are_no_difference_from_its_start(ran, replayed, uses_it):
    """A healthy program had "other bits" at its end, and was said not to repeat itself: each start of python begins its stream elsewhere."""
    uses = ("    loss.backward()", "    loss = loss * random.random()\n    loss.backward()")
    command = [
        *ran("a", ("random.seed(0); np.random.seed(0);", "random.seed(os.urandom(9));"), *([uses] if uses_it else []))[
            :-1
        ],
        "{run}",
    ]
    code, found = replayed("replay", "runs/a", "--from", 0, command=command)
    fits_its_schema("replay", found)
    assert (code, found["same"], found["difference"] is not None) == ((3, False, True) if uses_it else (0, True, False))
    if not uses_it:
        code, found = replayed("replay", "runs/a", "--from", 4, command=command)
        assert (code, found["same"], found["states"]["same"]) == (0, True, True)


def test_the_first_step_that_differs_is_named_with_what_differs_in_it(ran, replayed, tmp_path, capsys):
    """Another program than that of the run: the seventh loss is another one, and then the state."""
    ran("a")
    (tmp_path / "a.py").write_text(replay_cases.program(replay_cases.RECORDS, replay_cases.TWICE, BATCH))
    command = ran("b", BATCH)
    code, found = replayed("replay", "runs/a", "--from", 4, "--to", 8, command=[*command[:-1], "runs/a"])
    fits_its_schema("replay", found)
    assert code == 3
    assert (found["difference"]["step"], found["difference"]["parts"]) == (7, ["loss"])
    assert main(["replay", "runs/a", "--from", "4", "--to", "8", "--", *command[:-1], "runs/a"]) == 3
    said = capsys.readouterr()
    assert "step 7: the loss is" in said.out
    assert "model.params['first.weight']" in said.out
    assert "replay again" in said.err


def test_a_replay_that_ends_before_its_last_step_differs(ran, replayed, capsys):
    """R04: what it did not run is not called replayed; the checkpoint that is missing is that of the replay."""
    command = ran("a")
    ran("short", ("    if manager.should_stop:", "    if manager.should_stop or live.progress.step == 6:"))
    code, found = replayed("replay", "runs/a", "--from", 4, "--to", 8, command=[*command[:-2], "short.py", "runs/a"])
    fits_its_schema("replay", found)
    assert (code, found["same"], found["steps"], found["reached"]) == (3, False, 2, 6)
    assert "ended after step 6" in found["error"]["found"]
    assert main(["replay", "runs/a", "--from", "4", "--to", "8", "--", *command[:-2], "short.py", "runs/a"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "replayed steps 5 to 6" in said
    assert "not compared: the replay has no checkpoint there" in said


def test_an_end_after_that_of_the_run_is_said(ran, replayed):
    """The run ended at step 12, and so does its replay: all that there is is compared."""
    command = ran("a")
    for words in (["--from", 8], []):
        code, found = replayed("replay", "runs/a", *words, "--to", 400, command=command)
        fits_its_schema("replay", found)
        assert (code, found["same"], found["reached"], found["from"]) == (0, True, 12, 8)
        assert found["warnings"] == ["--to is step 400, and the run ends at step 12: nothing after that is compared"]
    code, found = replayed("replay", "runs/a", "--from", 12, "--to", 400, command=command)
    assert code == found["error"]["exit_code"] == 2
    assert "ends at step 12" in found["error"]["found"]


def test_a_replay_stops_at_the_first_module_whose_output_is_not_finite(ran, replayed):
    """The module and the leaves of its inputs are named, in the step where it happens: it begins before the first loss of the log that is not finite."""
    explode = (
        "        h = self.first(x).relu()",
        "        if self.training and live.progress.step == 6: x = x / 0.0\n        h = self.first(x).relu()",
    )
    command = ran("a", explode)
    code, found = replayed("replay", "runs/a", "--to", 12, "--until-nonfinite", command=command)
    fits_its_schema("replay", found)
    assert (code, found["from"], found["nonfinite"]["step"], found["rank"], found["warnings"]) == (0, 4, 7, 0, [])
    assert found["nonfinite"]["output"]["module"] == "first"
    assert found["nonfinite"]["output"]["inputs"][0]["path"] == "inputs[0]"
    assert found["nonfinite"]["output"]["inputs"][0]["bad"] == 48
    code, found = replayed("replay", "runs/a", "--from", 8, "--until-nonfinite", command=command)
    fits_its_schema("replay", found)
    assert (code, found["nonfinite"]["step"]) == (0, 9)
    assert "the state of step 8 is not finite itself, as in model.params['first.weight']" in found["warnings"][0]


def test_a_loss_that_is_not_finite_where_every_output_is_is_named(ran, replayed):
    command = ran(
        "a",
        (
            "    live.record(loss=loss)",
            "    live.record(loss=loss if live.progress.step != 6 else loss.log() - float('inf'))",
        ),
    )
    code, found = replayed("replay", "runs/a", "--from", 4, "--until-nonfinite", command=command)
    assert (code, found["nonfinite"]["step"], found["nonfinite"]["output"]) == (0, 7, None)
    assert found["nonfinite"]["text"].startswith("the recorded loss is not finite")


@pytest.mark.long
def test_the_step_in_which_the_run_died_is_looked_at_too(ran, replayed, tmp_path):
    """No log has a record of it, so the replay ended before it, and all outputs were said to be finite."""
    dies = "    if live.progress.step == 6: model(x / 0.0); sys.exit(0)\n    loss.backward()"
    ran("a", ("    loss.backward()", dies))
    command = [sys.executable, str(tmp_path / "a.py"), "runs/a"]  # one that has an end of its own
    code, found = replayed("replay", "runs/a", "--until-nonfinite", command=command)
    fits_its_schema("replay", found)
    assert (code, found["from"], found["to"], found["nonfinite"]["step"]) == (0, 4, 7, 7)
    assert found["nonfinite"]["output"]["module"] == "first"


@pytest.mark.parametrize(
    ("dies", "ended"),
    [("os._exit(0)", 0), pytest.param("os.abort()", -6, marks=pytest.mark.long), pytest.param("os.kill(os.getpid(), 9)", -9, marks=pytest.mark.long)],
)  # fmt: skip
def test_a_program_that_dies_without_its_exit_handlers_is_looked_at_too(ran, replayed, dies, ended):
    """Python calls none where `os._exit` or a signal ends it: all outputs were said to be finite, with exit code 0."""
    ends = f"    if live.progress.step == 6: model(x / 0.0); {dies} if os.environ.get('TRAINFOLD_REHEARSAL') else sys.exit(0)\n    loss.backward()"
    command = ran("a", ("    loss.backward()", ends))
    code, found = replayed("replay", "runs/a", "--until-nonfinite", command=command)
    fits_its_schema("replay", found)
    assert (code, found["nonfinite"] and found["nonfinite"]["step"]) == (0, 7), found
    assert found["nonfinite"]["output"]["module"] == "first"
    assert found["nonfinite"]["text"].endswith(f"\nthe program ended without its exit handlers, with exit code {ended}")


@pytest.mark.parametrize(
    "dies", ["os.kill(os.getpid(), 9)", "os._exit(0)", pytest.param("raise MemoryError", marks=pytest.mark.long)]
)
def test_a_program_that_fails_in_the_first_step_is_not_answered_by_its_mask(ran, replayed, dies):
    """As one that was killed for its memory: the mask was named, with exit code 0. One that ends well says of nothing else why it did, and has no failure to show."""
    fails = f"    nn.Threshold(0.0, -float('inf'))(x)\n    if live.progress.step == 4 and os.environ.get('TRAINFOLD_REHEARSAL'): {dies}\n    loss.backward()"
    command = ran("a", ("    loss.backward()", fails))
    code, found = replayed("replay", "runs/a", "--from", 4, "--until-nonfinite", command=command)
    if dies == "os._exit(0)":
        assert (code, found["nonfinite"]["output"]["kind"]) == (0, "Threshold")
        return
    assert (code, found.get("error", {}).get("kind")) == (45, "ProgramFailed"), found
    assert (
        "in its first step, where the first output that is not finite is that of Threshold" in found["error"]["found"]
    )


@pytest.mark.long
def test_a_program_that_fails_again_where_the_run_ended_is_no_failure_of_the_look_at_its_steps(ran, replayed):
    """All before was finite, as it had been said before the replay went on to that step; and a run that ended well is compared with the state at its end."""
    dies = "    if live.progress.step == 6: raise SystemExit('disk full' if os.environ.get('TRAINFOLD_REHEARSAL') else 0)\n    loss.backward()"  # fmt: skip
    command = ran("a", ("    loss.backward()", dies))
    code, found = replayed("replay", "runs/a", "--until-nonfinite", command=command)
    fits_its_schema("replay", found)
    assert (code, found["reached"], found["nonfinite"], found["same"]) == (0, 6, None, True), found
    assert any("failed after step 6" in each for each in found["warnings"]), found["warnings"]
    assert replayed("replay", "runs/a", command=[*command[:-2], "-c", "raise SystemExit(1)"])[1]["error"]["kind"] == "ProgramFailed"  # fmt: skip
    command = ran("b")
    code, found = replayed("replay", "runs/b", "--until-nonfinite", command=command)
    assert (code, found["reached"], found["states"]["same"]) == (0, 12, True), found


def test_what_leaves_nothing_to_replay_is_refused_with_the_next_move(ran, replayed, tmp_path, monkeypatch):
    command = ran("a")
    for words, code, fix in (
        (["--from", 5], 11, "such as 4"),
        (["--from", 8, "--to", 8], 10, "later --to"),
    ):
        found_code, found = replayed("replay", "runs/a", *words, command=command)
        assert found_code == found["error"]["exit_code"]
        assert fix in found["error"]["fix"], (code, found)
    assert "name your program" in replayed("replay", "runs/a")[1]["error"]["fix"]
    _, found = replayed("replay", "runs/a", "--from", 4, command=[*command[:-1], "runs/other"])
    assert "name the run as the program does" in found["error"]["fix"]
    assert "managers/other-" in found["error"]["found"]
    _, found = replayed("replay", "runs/a", "--from", 4, command=["false"])
    assert found["error"]["kind"] == "ProgramFailed"
    fits_its_schema("replay", found)
    for path in (tmp_path / "runs/a").glob("flight-*.log"):
        path.unlink()
    assert "record=100" in replayed("replay", "runs/a", command=command)[1]["error"]["fix"]


def test_a_directory_in_the_run_or_around_it_is_refused(ran, replayed, tmp_path):
    """R04: what is in the run changes it; and what is around it was emptied, with the run of an earlier replay."""
    command = ran("a")
    assert replayed("replay", "runs/a", "--from", 4, "--to", 8, command=command)[0] == 0
    before = contents(tmp_path / "runs")
    for words in (["replay", "runs/a", "--dir", "runs/a/scratch"], ["replay", "runs/replay/run"], ["replay", "runs/a", "--dir", "runs/../runs/a"],
                  ["bisect", "runs/a", "runs/replay/run", "--dir", "runs/replay"], ["bisect", "runs/replay/run", "runs/a", "--dir", "runs/a/b"]):  # fmt: skip
        code, found = replayed(*words, command=command)
        assert (code, found["error"]["where"]) == (2, "--dir"), found
        assert "--dir runs/scratch" in found["error"]["fix"]
    assert contents(tmp_path / "runs") == before


def test_a_run_on_another_disk_is_copied(ran, replayed, monkeypatch):
    """No hard link leads from one filesystem to another."""
    command = ran("a")

    def no_link(*_, **__):
        raise OSError("another filesystem")

    monkeypatch.setattr(os, "link", no_link)
    assert replayed("replay", "runs/a", "--from", 8, "--to", 12, command=command)[0] == 0
    shutil.rmtree("runs/replay")


def test_processes_that_wait_for_the_one_with_the_nan_are_ended(ran, replayed):
    """As the other ranks do, in a collective that never ends: the replay is over as soon as the module is found."""
    waits = ("    loss.backward()", "    if live.progress.step == 6 and os.environ.get('TRAINFOLD_REHEARSAL'):\n        import time\n        if os.fork(): time.sleep(600)\n        loss = model(x / 0.0).mean()\n    loss.backward()")  # fmt: skip
    command = ran("a", waits)
    began = time.monotonic()
    code, found = replayed("replay", "runs/a", "--from", 4, "--until-nonfinite", command=command)
    assert (code, found["nonfinite"]["step"]) == (0, 7)
    assert time.monotonic() - began < 60

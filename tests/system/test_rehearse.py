"""`trainfold rehearse`: it catches programs with state outside the components, passes clean ones, and identifies those that never repeat."""

import contextlib
import json
import threading

import pytest
from kit.adapters.cli_cases import fits_its_schema
from kit.system import rehearse_cases
from kit.system.rehearse_cases import HIDDEN, PROGRAM, program

from trainfold.adapters.cli import main
from trainfold.adapters.cli.rehearse import disk_space as room
from trainfold.adapters.cli.rehearse.disk_space import most_kept
from trainfold.adapters.cli.rehearse.errors import (
    NeverResumed,
    NeverSaved,
    NoDiskSpace,
    NotRepeatable,
    ProgramFailed,
    ResumeDiffers,
)
from trainfold.adapters.cli.rehearse.moments import Trigger
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.rehearse import PICTURE, REPORT
from trainfold.adapters.cli.terminal.output import Different, show_error

rehearse = rehearse_cases.rehearse


def test_a_program_that_keeps_everything_is_identical_and_its_own_run_is_not_touched(rehearse, tmp_path):
    """W15: the program runs unchanged with two kills, and its own run directory is not created."""
    answer = rehearse(PROGRAM, kills=2, draws=True)
    assert answer.error is None, answer.data
    assert answer.data["outcome"] == "identical"
    assert answer.data["kills"] == 2
    assert [start["resumed_from"] is None for start in answer.data["starts"]] == [True, False, False]
    assert answer.data["checkpoints_compared"] > 0
    assert answer.data["values_compared"] > 0
    assert answer.data["unseeded_streams"] == []
    assert not (tmp_path / "runs").exists()
    report = json.loads((tmp_path / "rehearsal" / REPORT).read_text())
    fits_its_schema("rehearse", report)
    assert report["identical"] is True
    assert (tmp_path / "rehearsal" / PICTURE).exists()
    (one,), (other,) = answer.data["places"].values()
    assert main(["diff", one, other]) == 0


PUT_BACK = {
    "numbers drawn between the restore and the loop"
}  # G11: exact if a manager notices it, otherwise caught here


def data_files(folder):
    """The tensor files below a folder; several links to a file count once."""
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        return {path.stat().st_ino for path in folder.glob("**/model-*.safetensors")}
    return set()


def test_a_rehearsal_has_no_more_checkpoints_on_the_disk_than_it_says(rehearse, tmp_path):
    """A manager that keeps all saves at each of 12 steps: the disk has those of the whole run and four more; few when it is over."""
    settings = make_settings(["true"], steps=12, every=1)
    most, is_over = [0], threading.Event()

    def look():
        while not is_over.wait(0.002):
            most[0] = max(most[0], len(data_files(tmp_path / "rehearsal")))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        slower = program(
            ("    count += 1", "    count += 1; import time; time.sleep(0.02)")
        )  # than the cleanup beside it
        answer = rehearse(slower, kills=1, steps=12, every=1)
    finally:
        is_over.set()
        looker.join()
    assert answer.error is None, answer.data
    assert most_kept(settings) >= most[0] >= 12 + 1
    assert len(data_files(tmp_path / "rehearsal")) <= 4
    room = answer.data["room"]
    assert room["needed_bytes"] == most_kept(settings) * room["checkpoint_bytes"]


def test_a_disk_without_room_ends_a_rehearsal_after_the_first_save(rehearse, tmp_path, monkeypatch):
    """The message has the space that is needed and free; the program is ended, and nothing else runs."""
    monkeypatch.setattr(room, "free_bytes_at", lambda path: 100)
    with pytest.raises(NoDiskSpace, match=r"for 7 checkpoints of .* found 1?\d\d?\.?\d? k?B free.*--dir"):
        rehearse(PROGRAM)
    assert not (tmp_path / "rehearsal" / "again").exists()


USUAL = (  # hidden in a loop, in a model, in a dataset, in an optimizer, and where a manager can notice it
    "a variable of the loop", "a tensor that is a plain attribute", "a generator of the dataset",
    "moments that an optimizer's subclass keeps", "numbers drawn between the restore and the loop",
)  # fmt: skip


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.long) for kind in HIDDEN]
)
def test_a_program_with_hidden_state_is_caught(rehearse, kind, tmp_path):
    """W15: a rehearsal finds hidden state by its difference, or because the attach refuses it."""
    try:
        answer = rehearse(program(*HIDDEN[kind]), draws=kind == "a variable of the loop")
    except ProgramFailed as refused:
        if "expected" not in refused.found:
            raise
        return
    if kind in PUT_BACK and answer.error is None:
        return
    assert isinstance(answer.error, ResumeDiffers), answer.data
    first = answer.data["differences"][0]
    assert first["resumed_at"] in (4, 8)
    assert first["step"] > first["resumed_at"]
    assert answer.data["reasons"]
    assert answer.data["repeats_itself"]
    components = [each for each in answer.data["differences"] if each["kind"] == "component"]
    assert all(each["leaves"] for each in components)
    if components:
        paths = [path for each in components for path, *_ in each["leaves"]]
        measured = answer.data["first_leaves"]
        assert measured
        assert {each["leaf"] for each in measured} <= set(paths)
        assert {each["step"] for each in measured} == {components[0]["step"]}
        assert all(0 < each["differing"] <= each["elements"] for each in measured)
        assert any(each["largest"] for each in measured)
        assert measured[0]["leaf"] in str(answer.tables)
        assert f"{measured[0]['differing']} of {measured[0]['elements']}" in str(answer.tables)
        pair = next(row for table in answer.tables for row in table.rows if row[0] == "look further")[1].split()[2:]
        assert main(["diff", *pair]) == Different.exit_code
    assert not list(tmp_path.glob("rehearsal/again/**/step-*/"))


@pytest.mark.parametrize(
    ("steps", "every", "missed"),
    [(12, 6, "inside an epoch"), (5, 2, "end"), pytest.param(12, 4, "", marks=pytest.mark.long)],
)
def test_what_a_rehearsal_of_epochs_did_not_try_is_said(rehearse, steps, every, missed):
    """48 samples in batches of 8 are 6 steps per epoch. A dataset's own generator restarts with each epoch's workers, so a resume there is right."""
    answer = rehearse(PROGRAM, steps=steps, every=every)
    assert answer.error is None, answer.data
    said = answer.data["not_rehearsed"]
    assert missed in " ".join(said)
    assert bool(said) == bool(missed)
    assert all(each in str(answer.tables) for each in said)
    assert ("a kill during a save" in " ".join(said)) == (every == 6)
    if every == 6:  # its only save after the first is the last one, after which there is nothing to resume
        assert answer.data["starts"][0]["kill"]["during"] == "step"
        assert answer.data["starts"][1]["resumed_at"] == 6


def test_a_kill_that_comes_after_the_last_save_is_not_blamed_on_the_program(rehearse, monkeypatch):
    """W15: the run is over, so nothing can be compared; the report says this, and does not say that the program never saves."""
    monkeypatch.setattr(
        "trainfold.adapters.cli.rehearse.rehearse.plan_moments", lambda **_: [Trigger(12, in_save=False, fraction=0.0)]
    )
    monkeypatch.setattr(
        "trainfold.adapters.cli.rehearse.starts.arms",
        lambda seen, _: any(e.kind == "saved" and e.step == 12 for e in seen),
    )
    found = rehearse(program(("manager.close()", "import time; time.sleep(0.2)\nmanager.close()")), every=6).error
    assert isinstance(found, NeverResumed), found
    assert "--steps" in found.fix


def test_a_program_that_ends_before_its_kill_counts_as_ended(rehearse, monkeypatch):
    """W15: a kill that comes after the end does not count, because nothing was resumed."""
    monkeypatch.setattr("trainfold.adapters.cli.rehearse.moments.StepTimes.delay_secs", lambda *_: 1.0)
    answer = rehearse(program(("epochs=100", "epochs=2")), steps=40, every=5)
    assert isinstance(answer.error, NeverResumed), answer.data
    assert answer.data["kills"] == 0
    assert [start["ended"] for start in answer.data["starts"]] == ["by itself"]


def test_a_program_that_fails_after_its_last_step_is_told_so(rehearse):
    """W15: all bits are the same, but its final evaluation has no file to read."""
    with pytest.raises(
        ProgramFailed, match=r"(?s)start 1 of whole.*exit code 1 after its last step, 12.*no test set"
    ) as failed:
        rehearse(PROGRAM + "raise RuntimeError('no test set')\n")
    assert "manager.should_stop" in failed.value.fix


def test_a_program_that_is_not_seeded_does_not_repeat_itself_also_where_it_cannot_go_on(rehearse):
    """W15: each start has other data, so a resume is refused; the exit code shows that the reason is the missing seed."""
    found = rehearse(program(("torch.manual_seed(0)", "torch.seed()"))).error
    assert isinstance(found, NotRepeatable), found
    assert "start 2 of killed" in found.found
    assert "the last batch of the position" in found.found
    assert "torch.manual_seed(0)" in found.fix


@pytest.mark.parametrize("has_hidden_state", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_recorded_time_is_left_out_by_name_and_all_else_is_compared(rehearse, has_hidden_state):
    """W15: a value that affects no component does not count as non-repeating, and does not hide a difference either."""
    timed = ("live.record(loss=loss)", "import time; live.record(loss=loss, secs=time.perf_counter())")
    hidden = HIDDEN["a variable of the loop"] if has_hidden_state else []
    answer = rehearse(program(timed, *hidden))
    assert answer.data["repeats_itself"]
    assert answer.data["values_that_do_not_repeat"] == ["secs"]
    assert "recorded secs" in str(answer.tables)
    assert not any(each["name"] == "secs" for each in answer.data["differences"])
    assert isinstance(answer.error, ResumeDiffers) if has_hidden_state else answer.error is None, answer.error


def test_a_count_that_ends_the_loop_is_named_as_what_is_not_saved(rehearse):
    """W15: early stopping counts in a variable, so a resumed run trains longer; no value is wrong otherwise."""
    answer = rehearse(
        program(("    if manager.should_stop", "    if manager.should_stop or count == 10")), steps=20, every=4
    )
    assert isinstance(answer.error, ResumeDiffers), answer.data
    assert [(each["kind"], each["step"]) for each in answer.data["differences"]] == [("end", 10)]
    assert "the loop ended at another step" in answer.error.fix
    assert "early stop" in answer.error.fix


def test_a_value_that_no_component_explains_is_told_apart_from_one_that_is(rehearse):
    """A running average of the loss in a variable changes no training: the report says that no component differs."""
    answer = rehearse(program(("live.record(loss=loss)", "average = 0.9 * average + 0.1 * loss.item(); live.record(average=average)")))  # fmt: skip
    assert isinstance(answer.error, ResumeDiffers)
    assert {each["kind"] for each in answer.data["differences"]} == {"value"}
    assert "no component differs" in answer.data["reasons"][0]


def test_streams_that_a_program_does_not_seed_are_left_out_by_name(rehearse):
    """Many programs seed only torch: their losses repeat, while Python's stream, which they do not use, starts anywhere."""
    seedless = ("\nrandom.seed(0);", "\nrandom.seed(int.from_bytes(os.urandom(8), 'big'));")
    answer = rehearse(program(seedless))
    assert answer.error is None
    assert answer.data["outcome"] == "identical"
    assert answer.data["unseeded_streams"] == ["python"]
    assert "stream of python" in str(answer.tables)


RESTLESS = ("* scale", "* scale * (1 + 1e-6 * int.from_bytes(os.urandom(2), 'big') / 65536)")


@pytest.mark.parametrize(
    ("changes", "tolerance", "error"),
    [
        ([], None, NotRepeatable),
        ([], 1e-3, None),
        ([], 1e-12, ResumeDiffers),
        pytest.param(HIDDEN["a variable of the loop"], 1e-3, ResumeDiffers, marks=pytest.mark.long),
    ],
    ids=["no tolerance", "within", "beyond", "within, but for a hidden variable"],
)
def test_a_program_that_does_not_repeat_itself_is_told_apart(rehearse, changes, tolerance, error):
    """W15: even two whole runs differ, so the values that a resumed process computes again are compared with those of the killed one."""
    changed = [(old, new.replace(*RESTLESS)) for old, new in changes] or [RESTLESS]
    answer = rehearse(program(*changed), tolerance=tolerance)
    assert not answer.data["repeats_itself"]
    assert answer.data["computed_again"], answer.data["starts"]
    assert type(answer.error) is (error or type(None)), answer.error
    if error is None:
        assert answer.data["outcome"] == "within"
        assert 0 < max(pair["apart"] for pair in answer.data["computed_again"]) < 1e-3


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ([("    manager.step(live)\n", "")], NeverSaved, "manager.step"),
        ([("manager.restore(live)\n", "live.register('again', (lambda: {}, lambda tree: None))\n")], NeverResumed, "manager.restore"),
        ([('"runs/mine"', 'f"runs/{os.getpid()}"')], NeverResumed, "same place"),
        ([("    count += 1", "    count += 1\n    assert count < 7, 'the disk is full'")], ProgramFailed, "the disk is full"),
    ],
    ids=["no step", "no restore", "another place each time", "fails"],
)  # fmt: skip
def test_a_program_that_cannot_be_rehearsed_is_told_why(rehearse, changes, error, says):
    """Each reason has its own exit code and a fix."""
    try:
        found = rehearse(program(*changes)).error
    except ProgramFailed as failed:
        found = failed
    if error is NeverResumed and isinstance(
        found, ProgramFailed
    ):  # a manager may refuse to save into a run that was never restored
        assert "restore" in found.found
        return
    assert isinstance(found, error)
    assert says in str(found)


def test_what_a_failing_program_said_is_shown_in_lines_that_cannot_pass_for_ours(rehearse, capsys):
    """W23: its traceback is readable, and no line of it begins where a line of the command does."""
    talk = "    print('ProgramFailed: no\\n  fix       pay\\x1b[2J'); 1 / 0"
    with pytest.raises(ProgramFailed) as caught:
        rehearse(program(("    count += 1", f"    count += 1\n{talk}")))
    show_error(caught.value)
    lines = capsys.readouterr().err.splitlines()
    assert "    ProgramFailed: no" in lines
    assert "      fix       pay\\x1b[2J" in lines
    assert "    ZeroDivisionError: division by zero" in lines
    assert [line.split()[0] for line in lines if not line.startswith("    ")] == [
        "ProgramFailed:",
        "expected",
        "found",
        "fix",
    ]


def test_a_program_that_hangs_is_ended_and_named(rehearse):
    with pytest.raises(ProgramFailed, match="nothing for 1 s"):
        rehearse(
            program(("    count += 1", "    count += 1\n    if count == 3:\n        import time; time.sleep(60)")),
            patience_secs=1.0,
        )

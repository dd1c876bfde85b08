"""What a program does when it is run again counts in a bisection as far as it goes, and beside logs that can be believed."""

import shutil

from kit.adapters.manager import replay_cases
from kit.adapters.manager.parting_cases import flip_a_bit, train

REPEATS = [f"the program of {program} repeats {run}" for program, run in ("AA", "AB", "BB")]


bisected = replay_cases.bisected


def test_a_program_that_ended_before_the_step_in_question_is_said_to_have_ended_there(bisected, tmp_path):
    """It was called "not tried", with the advice to put it after the two runs, where it was."""
    train(tmp_path / "a")
    train(tmp_path / "b", at_four=flip_a_bit, record=0)
    train(tmp_path / "short", steps=4)
    answer = bisected("true", "{run}", a="short", b="short")
    rows = dict(answer.tables[0].rows)
    assert {rows[name] for name in REPEATS} == {"not known: it ended after step 4, before that step"}
    assert (answer.data["step"], answer.data["repeats"], answer.data["reached"]) == (5, [None, None], [4, 4])
    assert "let the program of A and that of B run until step 5" in answer.error.fix
    assert "put the program" not in answer.error.fix


def test_a_program_that_was_not_run_is_said_to_be_untried(bisected, tmp_path):
    train(tmp_path / "a")
    train(tmp_path / "b", at_four=flip_a_bit, record=0)
    answer = bisected()
    rows = dict(answer.tables[0].rows)
    assert [rows.get(name) for name in REPEATS] == [*["not tried: put the program of A after --"] * 2, None]
    assert answer.data["reached"] == [None, None]
    rows = dict(bisected("true", a="a").tables[0].rows)
    assert rows[REPEATS[2]] == "not tried: put {run} into the command, or name its program with --program-b"


def test_a_log_that_is_not_of_its_run_does_not_speak_against_a_program_that_repeats_the_run(bisected, tmp_path):
    """That of another run was copied in; the program of B does again what the checkpoints of B have."""
    train(tmp_path / "a")
    train(tmp_path / "b", at_four=flip_a_bit)
    shutil.copytree(tmp_path / "b", tmp_path / "again", symlinks=True)
    shutil.copy(tmp_path / "a" / "flight-00000.log", tmp_path / "b")
    found = bisected("true", "{run}", a="a", b="again").data
    assert (found["step"], found["repeats"], found["repeats_itself"]) == (6, [True, False], [True, True]), found["text"]
    assert found["cause"] != "fault"

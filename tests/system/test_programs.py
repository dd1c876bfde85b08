"""Seven typical programs and the examples are killed with SIGKILL and resumed, and end with the same bits in every component."""

import os

import pytest

from trainfold.adapters.cli.rehearse.errors import NeverResumed, ResumeDiffers
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal

IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")
KILLS, SEEDS = (4, range(6)) if IS_DEEP else (2, range(1))
PROGRAMS = {
    "char_gpt": {"model", "optimizer", "trainer", "rng", "ahead"},
    "mnist_cnn": {"model", "optimizer", "scheduler", "trainer", "dataset", "rng"},
    "dcgan": {"model", "optimizer", "trainer", "dataset", "rng", "discriminator", "optimizer_d"},
    "vae": {"model", "optimizer", "trainer", "dataset", "rng"},
    "word_lm": {"model", "trainer", "rng", "rest"},
    "ddpm": {"model", "optimizer", "scheduler", "trainer", "dataset", "rng", "ema"},
    "reinforce": {"model", "optimizer", "trainer", "rng", "world"},
}
USUAL = {
    "mnist_cnn",
    "dcgan",
    "word_lm",
    "reinforce",
}  # a scheduler, two models, an object of its own without a dataset, a world
EXAMPLES = {"existing_loop": [], "functional_loop": ["{run}"], "evaluate": ["{run}", "--batch-size", "7"]}


@pytest.mark.slow(1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in PROGRAMS]
)
def test_a_program_that_is_killed_ends_with_the_bits_of_one_that_was_not(name, seed, root, warm_python, tmp_path):
    """W15, V13: compares every component and every recorded value, over two epochs or more, with kills in steps and in saves."""
    command = warm_python.command(root / "tests" / "programs" / f"{name}.py", "--out", "{run}")
    answer = run_rehearsal(tmp_path / "rehearsal", make_settings(command, steps=14, every=4, kills=KILLS, seed=seed))
    assert answer.error is None, (answer.error, answer.data["starts"])
    assert answer.data["outcome"] == "identical"
    assert answer.data["kills"] >= 1
    assert answer.data["values_compared"] >= 4
    assert answer.data["not_rehearsed"] == []
    rows = {row[0]: row for row in answer.tables[0].rows}
    assert {row for row in rows if rows[row][1].startswith("xxh3:")} == PROGRAMS[name]


ATTACHED = {
    "char_gpt": ', extra={"ahead": (get_ahead, set_ahead)}',
    "word_lm": ', extra={"rest": (get_rest, set_rest)}',
    "reinforce": ', extra={"world": (get_world, set_world)}',
}


@pytest.mark.parametrize(
    "name",
    [pytest.param("char_gpt", marks=pytest.mark.long), pytest.param("word_lm", marks=pytest.mark.long), "reinforce"],
)
def test_the_same_program_that_leaves_something_out_is_caught(name, root, warm_python, tmp_path):
    """It leaves out a batch that was drawn ahead, a hidden state of an LSTM, or the generator of a simulated world, which only a rehearsal can see."""
    text = (root / "tests" / "programs" / f"{name}.py").read_text()
    assert text.count(ATTACHED[name]) == 1
    (tmp_path / "train.py").write_text(text.replace(ATTACHED[name], ""))
    command = warm_python.command(tmp_path / "train.py", "--out", "{run}")
    answer = run_rehearsal(tmp_path / "rehearsal", make_settings(command, steps=10, every=3, kills=1))
    assert isinstance(answer.error, ResumeDiffers), answer.data
    first = answer.data["differences"][0]
    assert (first["kind"], first["step"]) == ("value", first["resumed_at"] + 1)  # the first step after the resume


@pytest.mark.parametrize(
    "name", ["functional_loop", *(pytest.param(name, marks=pytest.mark.long) for name in ("existing_loop", "evaluate"))]
)
def test_an_example_is_rehearsed(name, root, warm_python, tmp_path, monkeypatch):
    """Each program of examples/ runs unchanged; two of them have no manager, and are followed by their checkpoints."""
    monkeypatch.chdir(tmp_path)
    command = warm_python.command(root / "examples" / f"{name}.py", *EXAMPLES[name])
    for seed in range(4):  # a program without a manager does not wait for the kill
        settings = make_settings(command, steps=20, every=4, kills=1, seed=seed)
        answer = run_rehearsal(tmp_path / "rehearsal", settings)
        was_over = answer.data["outcome"] == "nothing" or isinstance(answer.error, NeverResumed)
        if answer.data["kills"] and not was_over:
            break
    assert answer.error is None, (answer.error, answer.data["starts"])
    assert answer.data["outcome"] == "identical"
    assert answer.data["starts"][-1]["resumed_at"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["rehearsal"]

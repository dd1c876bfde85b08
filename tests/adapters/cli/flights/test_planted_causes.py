"""Causes that are planted into a run, at each cadence of checkpoints and logs: each is named, or is one of those that are said to be open."""

from functools import partial

import pytest
import torch
from kit.adapters.cli_cases import fits_its_schema
from kit.adapters.manager import replay_cases
from kit.adapters.manager.parting_cases import (
    BACKWARDS,
    flip_a_bit,
    reset_mean,
    sum_backwards,
    train,
    train_pure,
    train_two_rates,
)

from trainfold.adapters.cli.flights.bisect_runs import bisect_runs

CADENCES = {
    "each step": {"every": 1, "record": 1},
    "each fourth step": {"every": 4, "record": 4},
    "no log": {"every": 4, "is_logged": False},
    "the log alone": {"every": 1000, "record": 0},
    "the log alone, with states": {"every": 1000, "record": 1},
}
LEAF, NOTE = "second.groups[0].hyper['lr']", "first rates of second.param_groups[0]"
NOISES = {"noise": "generator"}
PLANTED = {  # what is planted, what both programs have, and the cause; and where that is not named, but is open
    "another seed": ({"seed": 1}, {}, "seed", {"the log alone", "the log alone, with states"}),
    "another seed of a pure loop": ({"seed": 3}, {"is_pure": True}, "seed", {"the log alone", "the log alone, with states"}),
    "another seed of numpy": ({"noise_seed": 1}, {"noise": "numpy"}, "seed", {"no log"}),
    "another seed of python": ({"noise_seed": 1}, {"noise": "python"}, "seed", {"no log"}),
    "another seed of a generator": ({"noise_seed": 1}, NOISES, "seed", {"no log", "the log alone", "the log alone, with states"}),
    "a swapped batch": ({"swaps": True}, {}, "batch", {"no log"}),
    "a changed learning rate": ({"lr": 0.2}, {}, "setting", {"the log alone", "the log alone, with states"}),
    "a rate that the loop changed": ({"doubles_lr": True}, {}, "setting", {"the log alone", "the log alone, with states"}),
    "a scheduler without steps": ({"forgets": True}, {}, "setting", {"the log alone"}),
    "a forgotten scheduler": ({"schedules": False}, {}, "component", {"the log alone", "the log alone, with states"}),
    "a number of threads": ({"threads": 2}, {"threads": 1}, "environment", {"no log", "the log alone", "the log alone, with states"}),
    "a flipped bit": ({"at_four": flip_a_bit}, {}, "bit", {"no log", "the log alone", "the log alone, with states"}),
    "a stale buffer": ({"at_four": reset_mean}, {}, "buffer", {"the log alone", "the log alone, with states"}),
    "another kernel": ({"at_four": sum_backwards}, {}, "arithmetic", {"no log"}),
    "dropout in eval": ({"drops": False}, {}, "streams", {"no log"}),
    "a lost window": ({"loses_window": True}, {}, "position", set()),
}  # fmt: skip

KERNEL = {"at_four": sum_backwards}
REPLAYED = {  # what is planted into B, what is run again for A and for B, and what is named, and what else is open
    "a number of threads": ({"threads": 2}, {}, {}, "environment", "arithmetic"),
    "a kernel of which there is no log": ({**KERNEL, "is_logged": False}, None, None, "unrecorded", "arithmetic"),
    "a kernel, and only the program of A": (KERNEL, {}, None, "arithmetic", "bit"),
    "a kernel, and the program of A for both": (KERNEL, {}, {}, "fault", "arithmetic"),
    "a kernel, and both programs": (KERNEL, {}, KERNEL, "arithmetic", None),
    "a flipped bit, and both programs": ({"at_four": flip_a_bit, "record": 0}, {}, {}, "fault", "arithmetic"),
    "a batch, and the program of A for both": ({"swaps": True}, {}, {}, "batch", None),
}

bisected = replay_cases.bisected


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The run of a program at a cadence, trained once."""
    runs, before = {}, torch.get_num_threads()

    def run(*, is_pure=False, **options):
        key = str((is_pure, options))
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("run") / "a"
            (train_pure if is_pure else partial(train, shuffles=True))(runs[key], **options)
            BACKWARDS.clear()
        return runs[key]

    yield run
    torch.set_num_threads(before)


def table():
    """Each row at each cadence; by default that which says least."""
    for planted in PLANTED:
        for cadence in CADENCES:
            marks = () if cadence == "the log alone" else (pytest.mark.long,)
            yield pytest.param(planted, cadence, marks=marks, id=f"{planted}-{cadence}")


@pytest.mark.parametrize(("planted", "cadence"), [*table()])
def test_the_cause_is_named_or_said_to_be_open(ran, tmp_path, planted, cadence):
    options, both, cause, is_open = PLANTED[planted]
    shared = {**both, **CADENCES[cadence]}
    one, other = ran(**shared), ran(**{**shared, **options})
    found = bisect_runs(one, other, (), directory=tmp_path, patience_secs=60).data
    fits_its_schema("bisect", found)
    if found["step"] is None:
        if planted == "a number of threads":
            pytest.skip("this machine adds alike on one thread and on two")
        assert (planted, cadence) == ("a stale buffer", "the log alone")  # no loss has shown it, and no state is known
        assert "their states were not compared" in found["warnings"][0]
        return
    assert found["cause"] == cause or cause in found["may_be"], found["text"]
    assert (found["cause"] == cause) == (cadence not in is_open), found["text"]


@pytest.mark.parametrize(
    ("cadence", "step", "cause"),
    [({"record": 1}, 4, "update"), ({"record": 0}, 5, "arithmetic"), ({"is_logged": False}, 6, "unrecorded")],
)
def test_an_optimizer_step_that_was_left_out_is_named_by_the_counters(tmp_path, cadence, step, cause):
    """That only results differ, by another kernel or precision, was all that was said, and the counters of Adam in the next checkpoint differ by one."""
    train(tmp_path / "a", adam=True, **cadence)
    train(tmp_path / "b", adam=True, loses_update=True, **cadence)
    found = bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "replay", patience_secs=60).data
    fits_its_schema("bisect", found)
    assert (found["step"], found["cause"]) == (step, cause), found["text"]
    assert cause == "update" or "update" in found["may_be"], found["text"]
    assert cause != "update" or all(each.endswith("['step']") for each in found["names"]), found["names"]


@pytest.mark.parametrize("planted", [pytest.param(each, marks=() if each in [*REPLAYED][:3] else pytest.mark.long) for each in REPLAYED])  # fmt: skip
def test_a_program_that_is_run_again_makes_no_wrong_cause_certain(bisected, tmp_path, planted):
    """Neither another environment, nor another program that was taken for that of B, is a fault for certain."""
    options, again_a, again_b, cause, is_open = REPLAYED[planted]
    before = torch.get_num_threads()
    made = {"a": {}, "b": options, "again_a": again_a, "again_b": again_b}
    for name, each in made.items():
        if each is not None:
            train(tmp_path / name, **{"threads": 1, **each})
            BACKWARDS.clear()
    torch.set_num_threads(before)
    command = () if again_a is None else ("true",) if again_b is None else ("true", "{run}")
    found = bisected(*command, a="again_a", b="again_b").data
    if found["step"] is None and planted == "a number of threads":
        pytest.skip("this machine adds alike on one thread and on two")
    assert (found["cause"], is_open in (*found["may_be"], None)) == (cause, True), found["text"]
    if planted == "a number of threads":
        assert "B was run again in another environment" in found["warnings"][0]


@pytest.mark.parametrize(
    ("planted", "both", "step", "cause", "names"),
    [
        ({"doubles_at": 5}, {}, 5, "setting", [LEAF]),
        ({"doubles_at": 4, "halves_at": 6}, {}, 4, "setting", [NOTE]),
        ({"noise_seed": 1}, {"follows": True}, 1, "seed", ["noise"]),
        ({"draws_at": 2}, {"follows": True}, 2, "streams", []),
    ],
    ids=["changed", "changed and put back", "follows another seed", "follows other random numbers"],
)
def test_a_rate_is_named_where_nothing_explains_it(tmp_path, planted, both, step, cause, names):
    """The note of the first rates was a setting, and so named before seeds and streams, from which rates may follow."""
    train_two_rates(tmp_path / "a", **both)
    train_two_rates(tmp_path / "b", **both, **planted)
    found = bisect_runs(tmp_path / "a", tmp_path / "b", (), directory=tmp_path / "replay", patience_secs=60).data
    fits_its_schema("bisect", found)
    assert (found["step"], found["cause"], found["names"]) == (step, cause, names), found["text"]
    assert NOTE in [each["name"] for each in found["settings"]]

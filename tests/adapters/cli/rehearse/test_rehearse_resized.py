"""`trainfold rehearse --nproc 3,2`: each start of the killed run has the next number of ranks."""

import os
import sys

import pytest
from kit.adapters.cli_cases import fits_its_schema
from kit.system import rehearse_cases

from trainfold.adapters.cli import main
from trainfold.adapters.cli.rehearse.errors import ResumeDiffers
from trainfold.adapters.cli.rehearse.options import make_settings
from trainfold.adapters.cli.rehearse.rehearse import run_rehearsal
from trainfold.adapters.cli.terminal.output import Answer

rehearse = rehearse_cases.rehearse
on_threads = rehearse_cases.on_threads
IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak")

RANKS = rehearse_cases.RANKS


def cells(answer, name):
    """The row of the first table that has a name."""
    return next(row[1:] for row in answer.tables[0].rows if row[0] == name)


def test_a_run_on_3_and_2_ranks_has_the_same_steps_and_samples(on_threads):
    """W15, G06: the bits are others, because sums are rounded otherwise; the counts and the position in the data are not."""
    answer = on_threads(RANKS, nproc=[3, 2], kills=2)
    assert answer.error is None, answer.data
    assert answer.data["outcome"] == "samples"
    assert answer.data["identical"] is False
    assert answer.data["settings"]["nproc"] == [3, 2]
    assert answer.data["components_of_ranks"] == ["rng"]
    assert answer.data["differences"] == []
    assert answer.data["values_compared"] > 0
    fits_its_schema("rehearse", answer.data)
    worst = max(answer.data["computed_again"], key=lambda pair: pair["apart"])
    assert worst["apart"] < 1e-5
    on = [cells(answer, f"start {number}")[1].rpartition(" on ")[2] for number in (1, 2, 3)]
    assert on == ["3 ranks", "2 ranks", "3 ranks"]
    assert cells(answer, "dataset")[0] == cells(answer, "dataset")[1]
    assert cells(answer, "dataset")[1].startswith("epoch 2, sample ")
    assert cells(answer, "identical: no, but the same steps and samples")


def test_the_same_bits_on_another_number_of_ranks_are_identical(on_threads):
    """W15: a run that trains nothing rounds nothing."""
    still = RANKS.replace("lr=0.05, momentum=0.9", "lr=0.0").replace("loss=sums[0]", "step=live.progress.step")
    answer = on_threads(still, nproc=[1, 2])
    assert answer.error is None, answer.data
    assert answer.data["identical"] is True
    assert answer.data["components_of_ranks"] == ["rng"]


@pytest.mark.parametrize(("tolerance", "outcome"), [(1e-3, "within"), (0.0, "beyond")])
def test_a_tolerance_judges_how_far_values_may_be_apart(on_threads, tolerance, outcome):
    answer = on_threads(RANKS, nproc=[3, 2], tolerance=tolerance)
    assert answer.data["outcome"] == outcome
    if outcome == "beyond":
        assert isinstance(answer.error, ResumeDiffers)
        assert answer.error.expected == "loss within 0.0 of the run that was never killed"
        assert "--nproc 3 alone" in answer.error.fix
    else:
        assert answer.error is None


def test_a_batch_for_each_rank_is_found_by_the_counts(on_threads):
    """G06: a batch size that counts for each rank reads other samples in each step; a resume refuses it, unless it is declared."""
    other = RANKS.replace("data, 12,", "data, 6 * ranks.world_size,").replace(
        "collectives=ranks", "collectives=ranks, policy={'batch_size': 'adapt'}"
    )
    answer = on_threads(other, nproc=[2, 1], tolerance=1e9)
    assert isinstance(answer.error, ResumeDiffers)
    assert {each["name"] for each in answer.data["differences"]} <= {"trainer", "dataset"}
    assert "GlobalBatchSampler" in answer.error.fix


def test_samples_that_could_not_be_compared_are_listed(on_threads):
    """W15: without an attached loader, nothing says which samples were read."""
    plain = RANKS.replace("optimizer, loader=loader)", "optimizer)").replace(
        "in live.batches(epochs=100)", "in (batch for _ in range(100) for batch in loader)"
    )
    answer = on_threads(plain.replace("live.advance()", "live.advance(samples=12)"), nproc=[2, 1])
    assert any("each sample is read once" in each for each in answer.data["not_rehearsed"])
    assert cells(answer, "identical: no, but the same steps")


@pytest.mark.parametrize(
    ("typed", "found"), [("3,2", (3, 2)), ("2", (2,)), ("3, 2", (3, 2)), ("3,", None), ("two", None), ("", None), ("3,0", None)]
)  # fmt: skip
def test_numbers_of_ranks_are_typed_with_commas(typed, found, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(
        "trainfold.adapters.cli.rehearse.rehearse.run_rehearsal",
        lambda _, settings: asked.append(settings) or Answer({}, ()),
    )
    code = main(["rehearse", "--nproc", typed, "--dir", "here", "--", sys.executable, "{run}"])
    assert [settings.nproc for settings in asked] == ([] if found is None else [found])
    assert (code == 0) == (found is not None)
    if found is None:
        assert "--nproc" in capsys.readouterr().err


@pytest.mark.skipif(not IS_DEEP, reason="five starts of torchrun, 8 s each: part of the laws")
def test_an_example_is_rehearsed_on_3_and_2_processes(root, tmp_path):
    """W15, H02, N06: a run that loses a rank reads the same samples in the same steps."""
    command = [sys.executable, str(root / "examples" / "ddp.py"), "{run}"]
    answer = run_rehearsal(tmp_path / "rehearsal", make_settings(command, steps=20, kills=2, nproc=[3, 2]))
    assert answer.error is None, answer.data
    assert answer.data["outcome"] == "samples"
    fits_its_schema("rehearse", {**answer.data})

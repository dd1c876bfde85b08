"""The example that evaluates, as a user would run it: killed, started again, on two ranks."""

from pathlib import Path

import pytest
from kit.system.examples import lines_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluate.py"
TORCHRUN = ["--nproc-per-node=2", "--standalone"]


def run_example(run, *options, warm, ranks=(), kill_after=None):
    """Run it and return its lines; with ``ranks``, under torchrun."""
    words = [EXAMPLE, run, *options]
    return lines_of(warm.torchrun(ranks, *words) if ranks else warm.command(*words), kill_after)


def results(lines):
    return dict(line.split(": ", 1) for line in lines[-4:])


@pytest.mark.slow(3)
def test_an_evaluation_that_is_killed_goes_on_and_ends_with_the_same_bits(warm_python, tmp_path):
    """Q01, P30: it is killed in the middle and continues on another number of ranks with another batch size."""
    whole = run_example(tmp_path / "whole", warm=warm_python)
    assert whole[0] == "from sample 0 of 500"
    run_example(tmp_path / "killed", warm=warm_python, kill_after="240 samples")
    rest = run_example(tmp_path / "killed", warm=warm_python)
    first = int(rest[0].split()[2])
    assert 240 <= first < 500
    assert results(rest) == results(whole)

    run_example(tmp_path / "other", warm=warm_python, kill_after="160 samples")
    other = run_example(tmp_path / "other", "--batch-size", "14", warm=warm_python, ranks=TORCHRUN)
    assert 160 <= int(next(line for line in other if line.startswith("from sample")).split()[2]) < 500
    for name in (
        "loss",
        "perplexity",
        "top-5 accuracy",
    ):  # a model's kernels may round a row differently in another batch
        mine, theirs = (float.fromhex(results(lines)[name]) for lines in (other, whole))
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert results(other)["top-5 accuracy"] == results(whole)["top-5 accuracy"]

"""The example that composes functions, as a user would run it: killed, started again, compared."""

from pathlib import Path

import pytest
from kit.system.examples import lines_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "functional_loop.py"


@pytest.mark.slow(2)
def test_the_loop_of_functions_survives_a_kill_and_ends_with_the_same_bits(warm_python, tmp_path):
    whole = lines_of(warm_python.command(EXAMPLE, tmp_path / "whole"))
    assert whole[0] == "starting after step 0"
    killed = lines_of(warm_python.command(EXAMPLE, tmp_path / "killed"), kill_after="step 23:")
    rest = lines_of(warm_python.command(EXAMPLE, tmp_path / "killed"))
    first = int(rest[0].removeprefix("starting after step "))
    assert 20 <= first <= 60
    assert first % 5 == 0
    assert rest[1:] == whole[first + 1 :]
    assert killed[1:24] == whole[1:24]
    fingerprints = [line.split()[0] for line in whole[61:]]
    assert fingerprints == ["model", "optimizer", "scheduler", "trainer", "dataset", "rng"]

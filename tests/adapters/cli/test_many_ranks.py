"""The commands on a checkpoint that 64 ranks have written: as short as on one of a single rank, and each damage by name."""

import json

import pytest
import torch

import trainfold
from trainfold.adapters.cli import main
from trainfold.core.errors import CheckpointDamaged
from trainfold.ranks import run_threads

RANKS = 64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one checkpoint of 64 ranks: an average that they share, and streams of each rank."""
    folder = tmp_path_factory.mktemp("many") / "run"
    weights = {f"w{index}": torch.full((64, 4), float(index)) for index in range(80)}

    def save(collectives):
        rng = {"torch": torch.full((16,), collectives.rank, dtype=torch.uint8)}
        trainer = trainfold.states.make_progress(step=1)
        state = trainfold.TrainState(trainer=trainer, extra={"ema": weights}, rng=rng)
        trainfold.save(state, folder, collectives=collectives)

    run_threads(RANKS, save)
    return folder


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "plan"])
def test_what_is_printed_does_not_grow_with_the_number_of_ranks(run, command, capsys):
    """W09: no row for each of a hundred files; the JSON has them all."""
    assert main([command, str(run)]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 50, shown
    assert "-of-00064" not in shown
    if command in ("inspect", "verify"):
        assert f"rng: {RANKS} files" in shown
        main([command, str(run), "--json"])
        names = {each["name"] for each in json.loads(capsys.readouterr().out)["files"]}
        assert {f"rng-{rank:05d}-of-00064.safetensors" for rank in range(RANKS)} <= names


def test_the_damaged_file_of_one_rank_has_its_own_row(run, capsys):
    (path,) = (run / "step-00000001").glob("rng-00017-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert main(["verify", str(run)]) == CheckpointDamaged.exit_code
    finally:
        path.write_bytes(whole)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(row[:1] == [path.name] and row[-1] == "damaged" for row in rows)
    assert any(row[:3] == ["rng:", "63", "files"] and row[-1] == "verified" for row in rows)

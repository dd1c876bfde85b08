"""Checkpoints that old releases wrote load for ever; the files in tests/compat are never made again."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import trainfold
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.inventory import read_manifest
from trainfold.backends.local import LocalStore
from trainfold.core.fingerprint import fingerprint
from trainfold.core.state import Progress, TrainState

COMPAT = Path(__file__).parent / "compat"
VERSIONS = sorted(path.name for path in COMPAT.iterdir() if path.is_dir())


@pytest.mark.filterwarnings("ignore::trainfold.backends.run_load.ResumeDrift")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_of_every_schema_version_loads_with_the_bits_it_had(version, step, tmp_path):
    """R10: a checkpoint written by release N loads later; every dtype, odd scalar and tie of it."""
    shutil.copytree(COMPAT / version / "run", tmp_path / "run", symlinks=True)
    expected = json.loads((COMPAT / version / "fingerprints.json").read_text())[str(step)]
    loaded = trainfold.load(tmp_path / "run", like=TrainState(trainer=Progress()), step=step)
    assert fingerprint(loaded) == expected
    manifest = read_manifest(LocalStore(tmp_path / "run"), f"step-{step:08d}")
    assert {component.name: component.fingerprint for component in manifest.components} == expected
    assert verify_checkpoint(tmp_path / "run" / f"step-{step:08d}").error is None


@pytest.mark.filterwarnings("ignore::trainfold.backends.run_load.ResumeDrift")
def test_training_goes_on_from_an_old_checkpoint(tmp_path):
    """R10, V13: the first version's state is one that today's step can take further."""
    shutil.copytree(COMPAT / "v1" / "run", tmp_path / "run", symlinks=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    adamw = trainfold.optimizer(torch.optim.AdamW, lr=0.01)
    schedule = trainfold.wsd(10, warmup_steps=2, decay_steps=3)
    like = trainfold.init_state(model, adamw, seed=1, schedule=schedule, dataset=trainfold.make_cursor(100, seed=3))
    state = trainfold.load(tmp_path / "run", like=like, contract={"batch_size": 4})
    assert state.extra["tied"]["a"] is state.extra["tied"]["b"]
    assert state.dataset.next_index == 8
    loss = lambda m, b: trainfold.Loss(sum=(m(b) ** 2).sum(), weight=len(b))
    after, _ = trainfold.make_step(model, loss, adamw, schedule=schedule)(state, torch.ones(4, 4))
    assert after.trainer.step == 3

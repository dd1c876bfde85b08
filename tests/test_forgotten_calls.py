"""What a loop forgets to call, or names wrongly, is refused at the first call that can see it, and not found out at a resume."""

import pytest
import torch

from trainfold.adapters.live.live import attach
from trainfold.adapters.manager.config import CheckpointConfig, create_checkpoint_manager
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.memory import MemoryStore
from trainfold.core.errors import UnknownComponent


@pytest.mark.parametrize(("name", "near"), [("modell", "model"), ("optimzer", "optimizer"), ("datasets", "dataset")])
def test_a_mistyped_component_is_refused_when_the_manager_is_made_with_the_nearest_name(name, near, tmp_path):
    """B02: not at the first save, which may be hours away; nothing is touched."""
    with pytest.raises(UnknownComponent, match=f"did you mean '{near}'"):
        CheckpointManager(tmp_path / "run", components=["trainer", name])
    config = CheckpointConfig(run=tmp_path / "run", components=[name])
    with pytest.raises(UnknownComponent, match=f"did you mean '{near}'"):
        create_checkpoint_manager(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("call", ["step", "should_save", "save", "restore", "should_load", "load"])
def test_a_component_that_the_run_does_not_have_is_refused_by_the_first_call_that_sees_the_run(call):
    """B02: also where no save is due; the names that the run has are listed."""
    live = attach(torch.nn.Linear(1, 1), extra={"ema": torch.nn.Linear(1, 1)})
    with (
        CheckpointManager(MemoryStore(), every=1000, components=["model", "emma"]) as manager,
        pytest.raises(UnknownComponent, match=r"'ema'.*did you mean 'ema'"),
    ):
        getattr(manager, call)(live)


def test_components_of_ones_own_that_are_numbered_or_qualified_are_not_taken_for_slips():
    model = torch.nn.Linear(1, 1)
    live = attach(model, extra={"model2": torch.nn.Linear(1, 1), "model_ema": torch.nn.Linear(1, 1)})
    with CheckpointManager(MemoryStore(), components=["model2", "model_ema"]) as manager:
        assert manager.save(live).status == "written"

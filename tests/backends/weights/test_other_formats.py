"""A path of another format than was asked for is refused by name, with what reads it."""

import pytest
import torch
from safetensors.torch import save_file

import trainfold
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.core.errors import CheckpointError, CheckpointForeign, ResumeRefused
from trainfold.weights import (
    CheckpointWeights,
    DcpDirectory,
    HubDirectory,
    TorchFile,
    accelerate_training,
    dcp_training,
    lightning_training,
    take_weights,
    torch_training,
    write_dcp_directory,
)


def live():
    return trainfold.attach(torch.nn.Linear(2, 1))


@pytest.fixture
def hub(tmp_path):
    path = tmp_path / "hub"
    path.mkdir()
    save_file(
        {name: each.detach() for name, each in torch.nn.Linear(2, 1).state_dict().items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text("{}")
    return path


def test_a_hub_directory_offered_for_a_resume_is_refused_and_left_as_it_is(hub):
    """V15: by a manager, a plan, a load and a save; no run starts in it."""
    before = sorted(each.name for each in hub.iterdir())
    said = r"as model hubs have them: model.safetensors, config.json(?s:.*)initial=trainfold.weights.HubDirectory\("
    state = live().capture()
    with pytest.raises(CheckpointForeign, match=said):
        trainfold.CheckpointManager(hub)
    assert "as model hubs have them" in str(trainfold.plan(hub, like=state))
    with pytest.raises(ResumeRefused, match=said):
        trainfold.load(hub, like=state)
    with pytest.raises(CheckpointForeign, match=said):
        trainfold.save(state, hub)
    assert sorted(each.name for each in hub.iterdir()) == before


def test_a_source_of_another_format_names_the_one_that_reads_it(hub, tmp_path):
    """V15."""
    state = live().capture()
    trainfold.save(state, tmp_path / "run")
    with pytest.raises(CheckpointForeign, match=r"use trainfold.weights.HubDirectory\('.*hub'\)"):
        take_weights(state, CheckpointWeights(hub))
    with pytest.raises(CheckpointForeign, match=r"use trainfold.weights.CheckpointWeights\('.*run'\)"):
        take_weights(state, HubDirectory(tmp_path / "run"))
    with pytest.raises(CheckpointForeign, match=r"use trainfold.weights.CheckpointWeights\('.*run', step=0\)"):
        take_weights(state, HubDirectory(tmp_path / "run/step-00000000"))


def test_a_directory_of_torch_names_the_source_that_reads_it(tmp_path):
    """V15."""
    state, path = live().capture(), tmp_path / "torch"
    write_dcp_directory(path, state)
    for source in (CheckpointWeights(path), HubDirectory(path)):
        with pytest.raises(CheckpointForeign, match=r"use trainfold.weights.DcpDirectory\('.*torch'\)"):
            take_weights(state, source)
    with pytest.raises(CheckpointForeign, match=r"initial=trainfold.weights.DcpDirectory\("):
        trainfold.CheckpointManager(path)
    take_weights(state, DcpDirectory(path, prefix="model"))


def test_an_export_in_a_run_is_not_taken_for_a_checkpoint(hub, tmp_path):
    """V15, T24: in the run, beside its steps, and named as one."""
    run, state = tmp_path / "run", live().capture()
    trainfold.save(state, run)
    hub.rename(run / "step-00000007")
    assert trainfold.plan(run, like=state).step == 0
    (run / "step-00000000/export").mkdir()
    (run / "step-00000007/model.safetensors").rename(run / "step-00000000/export/model.safetensors")
    assert trainfold.plan(run, like=state).step == 0
    with pytest.warns(CheckpointPassedOver, match="step-00000007"):
        trainfold.load(run, like=state)
    take_weights(state, HubDirectory(run / "step-00000000/export"))


READS = {
    CheckpointWeights: {"run"},
    HubDirectory: {"hub", "file"},
    DcpDirectory: {"dcp"},
    TorchFile: {"torch"},
    dcp_training: {"dcp"},
    torch_training: {"torch"},
    lightning_training: {"lightning"},
    accelerate_training: set(),
}
USE = {
    "run": "CheckpointWeights('{}')",
    "checkpoint": "CheckpointWeights('{parent}', step=0)",
    "hub": "HubDirectory('{}')",
    "file": "HubDirectory('{}')",
    "dcp": "DcpDirectory('{}')",
    "torch": "TorchFile('{}')",
}


def listed(reader, path):
    opened = reader(path)
    return getattr(opened, "model", opened).specs()


@pytest.mark.parametrize("reader", READS, ids=lambda each: each.__name__)
def test_each_reader_names_the_one_for_each_other_format(hub, tmp_path, reader):
    """V15: what is on disk must agree with what was asked, at every door to another program's weights."""
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters())
    state = trainfold.attach(model, sgd).capture()
    trainfold.save(state, tmp_path / "run")
    write_dcp_directory(tmp_path / "dcp", state)
    saved = {"model": model.state_dict(), "optimizer": sgd.state_dict()}
    torch.save(saved, tmp_path / "torch")
    places = {name: tmp_path / name for name in ("run", "hub", "dcp", "torch")}
    places |= {"checkpoint": tmp_path / "run/step-00000000", "file": hub / "model.safetensors"}
    for name, path in places.items():
        if name in READS[reader]:
            assert listed(reader, path)
            continue
        if (reader, name) == (lightning_training, "torch"):
            continue  # the same format, with other keys
        with pytest.raises(CheckpointForeign) as refused:
            listed(reader, path)
        use = USE[name].replace("{}", str(path)).replace("{parent}", str(path.parent))
        assert f"use trainfold.weights.{use}" in str(refused.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for path in (tmp_path / "other", tmp_path / "nothing"):
        with pytest.raises(CheckpointError) as refused:
            listed(reader, path)
        assert refused.value.fix

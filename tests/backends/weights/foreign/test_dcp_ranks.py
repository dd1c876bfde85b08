"""FSDP2 programs of real ranks and this library read each other's directories, whichever the number of ranks on either side."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.adapters.fsdp2_cases import OPTIMIZERS, Model, bits, sharded
from kit.backends import dcp_cases as cases
from kit.system.rank_refusals_cases import PATIENT
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainfold.adapters.live.attach import attach
from trainfold.core.weights.source import Wanted
from trainfold.weights import DcpDirectory, dcp_training, take_training, write_dcp_directory

pytestmark = pytest.mark.long
STEPS = 3


def begun(world_size, *, seed=0, **options):
    model = sharded(world_size, seed=seed, **options)
    return model, OPTIMIZERS["adamw"](model.parameters())


def trained(model, optimizer, scheduler=None, steps=range(STEPS)):
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))  # each rank has the same
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def saved(collectives, folder):
    """What a program of FSDP2 saves, and its bits."""
    model, optimizer = begun(collectives.world_size)
    trained(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state, "step": STEPS}, checkpoint_id=folder)
    return bits(model, optimizer)


def taken(collectives, folder):
    """A run of this library that goes on from it, and its bits."""
    model, optimizer = begun(collectives.world_size, seed=9)
    live = attach(model, optimizer)
    state = take_training(live.capture(), dcp_training(folder), collectives=collectives)
    live.restore(state, collectives=collectives)
    assert live.progress.step == STEPS
    return bits(model, optimizer)


def loaded(collectives, folder):
    """A program of FSDP2 that loads a directory that was written here, and its bits."""
    model, optimizer = begun(collectives.world_size, seed=9)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    found = {"model": model_state, "optim": optimizer_state, "step": -1}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    assert found["step"] == STEPS
    return bits(model, optimizer)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def titan(collectives, *, seed, step):
    """The objects of a program in the manner of torchtitan, and the state that it saves."""
    model, optimizer = begun(collectives.world_size, seed=seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
    trained(model, optimizer, scheduler, range(step))
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    state = {
        **model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": torch.tensor(step)},
    }
    return model, optimizer, scheduler, state


def saved_by_titan(collectives, folder):
    state = titan(collectives, seed=0, step=STEPS)[-1]
    dcp.save({**state, "dataloader": {f"dp_rank_{collectives.rank}": b"of a rank"}}, checkpoint_id=folder)


def goes_on(collectives, folder, with_torch):
    """The bits of the program after more steps, with what torch's own load has put into it, or this library."""
    model, optimizer, scheduler, state = titan(collectives, seed=9, step=1)
    if with_torch:
        dcp.load(state, checkpoint_id=folder)
        weights = {
            name: each for name, each in state.items() if name not in ("optimizer", "lr_scheduler", "train_state")
        }
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"], options=FLAT)
        scheduler.load_state_dict(state["lr_scheduler"])
    else:
        live = attach(model, optimizer, scheduler=scheduler)
        training = dcp_training(folder, model="", optimizer="optimizer", step="train_state.step")
        live.restore(take_training(live.capture(), training, collectives=collectives), collectives=collectives)
        assert live.progress.step == STEPS
        assert "not taken  dataloader" in str(training)
    trained(model, optimizer, scheduler, range(STEPS, STEPS + 3))
    return bits(model, optimizer)


def test_a_run_on_other_ranks_goes_on_from_torchtitan_as_with_its_own_load(processes, tmp_path):
    """M24: saved on two ranks, with a flat optimizer, a scheduler and a position that is not taken; the same bits after more steps as with `torch.distributed.checkpoint.load`."""
    folder = str(tmp_path / "theirs")
    processes.run(2, saved_by_titan, folder, collectives=PATIENT)
    for world_size in (1, 3):
        wanted = processes.run(world_size, goes_on, folder, True, collectives=PATIENT)
        assert processes.run(world_size, goes_on, folder, False, collectives=PATIENT) == wanted


def test_what_fsdp2_has_saved_on_two_ranks_is_read_by_one_and_in_parts_of_four(processes, tmp_path):
    """M24: uneven parts, and ranks with none of a tensor; each part is that of the whole, and a run on three ranks goes on from it."""
    folder = str(tmp_path / "theirs")
    wanted = processes.run(2, saved, folder, collectives=PATIENT)
    assert len(set(wanted)) == 1
    source = DcpDirectory(folder)
    everything = cases.everything(source)
    for name, spec in source.specs().items():
        rows = spec.shape[0] if spec.shape else 0
        step = -(-rows // 4)
        for part in range(4 if rows else 0):
            box = ((min(rows, part * step), min(rows, part * step + step)), *((0, size) for size in spec.shape[1:]))
            found = dict(source.supply({name: Wanted(spec.dtype, spec.shape, box)}))[name]
            assert cases.bits(found) == cases.bits(everything[name][slice(*box[0])]), name
    for world_size in (1, 3):
        assert set(processes.run(world_size, taken, folder, collectives=PATIENT)) == set(wanted)


def test_a_state_that_is_written_here_is_loaded_by_fsdp2_on_any_number_of_ranks(processes, tmp_path):
    """M24: one process writes, and two and three ranks load their parts, optimizer and step included."""
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    wanted = processes.run(2, saved, theirs, collectives=PATIENT)
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    live = attach(model, optimizer)
    live.restore(take_training(live.capture(), dcp_training(theirs)))
    assert bits(model, optimizer) == wanted[0]
    write_dcp_directory(ours, live.capture(), file_bytes=2000)
    for world_size in (2, 3):
        assert set(processes.run(world_size, loaded, ours, collectives=PATIENT)) == set(wanted)


def exported(collectives, folder, theirs):
    """Write a run that goes on from two ranks, while they hold it in parts, and its bits; and the directory that one rank writes of all of it."""
    model, optimizer = begun(collectives.world_size, seed=9)
    live = attach(model, optimizer)
    live.restore(take_training(live.capture(), dcp_training(theirs), collectives=collectives), collectives=collectives)
    write_dcp_directory(folder, live.capture(), collectives=collectives, file_bytes=2000)
    return bits(model, optimizer)


def test_a_state_in_parts_is_written_by_its_ranks_as_one_process_writes_it_whole(processes, tmp_path):
    """M24, J04: FSDP2 on two ranks writes the bytes of the whole state, which three load."""
    theirs, live, whole = str(tmp_path / "theirs"), tmp_path / "live", tmp_path / "whole"
    processes.run(2, saved, theirs, collectives=PATIENT)
    wanted = processes.run(2, exported, str(live), theirs, collectives=PATIENT)
    model = Model()
    alone = attach(model, OPTIMIZERS["adamw"](model.parameters()))
    alone.restore(take_training(alone.capture(), dcp_training(theirs)))
    write_dcp_directory(whole, alone.capture(), file_bytes=2000)
    names = sorted(each.name for each in whole.iterdir())
    assert names == sorted(each.name for each in live.iterdir())
    assert all((live / name).read_bytes() == (whole / name).read_bytes() for name in names)
    assert set(processes.run(3, loaded, str(live), collectives=PATIENT)) == set(wanted)

"""Every byte of a checkpoint is changed in turn: a resume detects it and loads an older checkpoint or none, never wrong bytes."""

import warnings

import pytest
import torch

import trainfold
from crash.disk.frozen_store import FrozenStore, files_in, materialise, visible
from crash.effort import IS_SOAK, say
from crash.saves.scenarios import digest_of_state
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.core.errors import TrainfoldError
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

SMALL = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([1.5, -2.0])}
FILES = ("run/step-00000002/model-00000-of-00001.safetensors", "run/step-00000002/manifest.json", "run/run.json")
CHANGES = {"one bit": lambda byte, at: byte ^ (1 << at % 8), "all bits": lambda byte, at: byte ^ 0xFF}


def state_of(step):
    params = {name: tensor + step for name, tensor in SMALL.items()}
    return TrainState(model=ModelState(Leaves(params), Leaves()), trainer=Progress(step=step, samples=4 * step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of a run with two checkpoints."""
    top = tmp_path_factory.mktemp("flips")
    for step in (1, 2):
        trainfold.save(state_of(step), top / "run")
    return visible(files_in(top))


def outcome(files, **options):
    """The result of a resume: the digest of a state, or the name of the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = digest_of_state(trainfold.load(FrozenStore(files), like=state_of(0), **options))
        except TrainfoldError as error:
            return type(error).__name__, len(caught)
    return found, len(caught)


def changed(files, path, at, how):
    data = bytearray(files[path])
    data[at] = CHANGES[how](data[at], at)
    return {**files, path: bytes(data)}


def positions(saved, name, how):
    """The positions to change: in the soak every byte, in the usual run a sample where there are many."""
    size, header = len(saved[name]), header_bytes(saved, name)
    some = 1 if IS_SOAK else 3 if how == "one bit" else 7
    return [at for at in range(0, size, some) if IS_SOAK or at < 8 or at >= header or at % 32 == 0]


def header_bytes(saved, name):
    """The offset at which the tensors of a data file start."""
    return 8 + int.from_bytes(saved[name][:8], "little") if name.endswith(".safetensors") else 0


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_no_changed_byte_is_loaded_in_silence(saved, name, how):
    """C04, C07, V03: a resume loads the older checkpoint with a warning, or is refused; a load of that step is always refused.

    This includes the header of a data file, with the names and offsets of its tensors for other readers, and the spaces after it.
    """
    older, newest = digest_of_state(state_of(1)), digest_of_state(state_of(2))
    assert outcome(saved) == (newest, 0)
    fell_back, refused = 0, 0
    for at in positions(saved, name, how):
        files = changed(saved, name, at, how)
        found, caught = outcome(files)
        assert found != newest, f"byte {at} is changed, and no check sees it"
        if found == older:
            assert caught, f"byte {at}: an older checkpoint is taken without a word"
            fell_back += 1
        else:
            assert len(found) < 32, f"byte {at}: a state that was never saved is loaded: {found}"
            refused += 1
        by_number, _ = outcome(files, step=2) if IS_SOAK or at % 5 == 0 else ("not asked", 0)
        assert len(by_number) < 32, f"byte {at}: asked for by its number, it is loaded: {by_number}"
    say(f"{name}, {how}: {fell_back} fell back, {refused} refused")


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_verify_finds_every_changed_byte_of_a_checkpoint(saved, how, tmp_path):
    """C07: this includes bytes that a resume does not read, because other programs read them."""
    materialise(saved, tmp_path)
    checkpoint, count = tmp_path / "run" / "step-00000002", 0
    assert verify_checkpoint(checkpoint).data["verified"]
    for name in FILES[:2]:
        place = tmp_path / name
        for at in range(0, len(saved[name]), 1 if IS_SOAK else 41):
            place.write_bytes(changed(saved, name, at, how)[name])
            try:
                is_verified = verify_checkpoint(checkpoint).data["verified"]
            except TrainfoldError:
                is_verified = False
            assert not is_verified, f"{name}, byte {at}"
            count += 1
        place.write_bytes(saved[name])
    assert verify_checkpoint(checkpoint).data["verified"]
    say(f"{how}: {count} changes, all found")

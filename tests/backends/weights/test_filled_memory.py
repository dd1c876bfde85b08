"""Files of a hub are read straight into the memory of a model where it has their very bytes: with the values, errors and checks of a copy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import trainfold
from trainfold.backends.formats import shared_read
from trainfold.backends.weights import hub_directory
from trainfold.core.errors import CheckpointTorn, InvalidState
from trainfold.core.state.spec import dtype_name
from trainfold.core.tensor_memory import tensor_bytes
from trainfold.core.weights.source import Wanted
from trainfold.transforms import compose, rename
from trainfold.weights import Cast, HubDirectory, LoadSpec, Renamed, SeveralSources, Transformed

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
SHAPES = ((), (0,), (3,), (4, 3), (4, 2, 3))


def bits(tensor, wanted):
    """The bytes of the part that is wanted, of it or of the whole tensor."""
    held = tuple(stop - start for start, stop in wanted.box)
    return bytes(tensor_bytes(tensor if tensor.shape == held else tensor[tuple(slice(*side) for side in wanted.box)]))


def filled(source, wanted, memory):
    """What a source supplies, with memory for some of it."""
    return {name: tensor.clone() for name, tensor in source.supply_into(wanted, memory.get)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A directory of tensors of many forms, and these."""
    torch.manual_seed(0)
    tensors = {f"{dtype_name(dtype)}.{len(shape)}.{''.join(map(str, shape))}": (torch.rand(shape) * 9).to(dtype) for dtype in DTYPES for shape in SHAPES}  # fmt: skip
    path = tmp_path_factory.mktemp("hub")
    save_file(dict(list(tensors.items())[::2]), path / "model-1.safetensors")
    save_file(dict(list(tensors.items())[1::2]), path / "model-2.safetensors")
    return path, tensors


WRAPPERS = {
    "alone": lambda source: (source, str),
    "cast": lambda source: (Cast(source), str),
    "renamed": lambda source: (Renamed(source, lambda name: name.removeprefix("net.")), lambda name: f"net.{name}"),
    "transformed": lambda source: (Transformed(source, rename("{name*}", "net.{name*}")), lambda name: f"net.{name}"),
    "several": lambda source: (SeveralSources([LoadSpec(source, strict="any")]), str),
}


@settings(max_examples=60)
@given(st.data())
def test_memory_that_a_source_fills_has_what_a_copy_has(hub, data):
    """Law: whatever wraps a directory, whatever part a rank holds and whatever memory it has, the tensors are those that `supply` yields."""
    path, tensors = hub
    source, name_of = WRAPPERS[data.draw(st.sampled_from(sorted(WRAPPERS)))](HubDirectory(path))
    wanted, memory = {}, {}
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), unique=True, min_size=1)):
        each = tensors[name]
        box = tuple(tuple(sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))) if data.draw(st.booleans()) else (0, size) for size in each.shape)  # fmt: skip
        held = [stop - start for start, stop in box]
        wanted[name_of(name)] = Wanted(dtype_name(each.dtype), tuple(each.shape), box)
        memory[name_of(name)] = data.draw(
            st.sampled_from([None, torch.empty(held, dtype=each.dtype), torch.empty([*held, 2], dtype=each.dtype)[..., 0]])
        )  # fmt: skip
    plain = dict(source.supply(wanted))
    found = filled(source, wanted, memory)
    assert found.keys() == wanted.keys()
    assert all(bits(found[name], each) == bits(plain[name], each) for name, each in wanted.items())


def linear(**tensors):
    model = torch.nn.Module()
    for name, each in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(each))
    return model


def test_weights_of_the_models_dtype_are_read_without_a_map(tmp_path, monkeypatch):
    """A map of the file, its pages looked at and unmapped, took longer than the copy."""
    save_file({"w": torch.arange(6.0), "v": torch.arange(4.0)}, tmp_path / "model.safetensors")
    model = linear(a=torch.zeros(6), v=torch.zeros(4))
    mapped = []
    monkeypatch.setattr(hub_directory, "_mapped", lambda place: mapped.append(place) or pytest.fail("mapped"))
    source = Transformed(HubDirectory(tmp_path), compose(rename("w", "a")))
    before = model.a._version
    trainfold.attach(model, weights=source).take_weights()
    assert torch.equal(model.a, torch.arange(6.0))
    assert torch.equal(model.v, torch.arange(4.0))
    assert model.a._version > before, "autograd has to know of the write"
    monkeypatch.undo()
    half = linear(w=torch.zeros(6, dtype=torch.bfloat16), v=torch.zeros(4))
    trainfold.attach(half, weights=Cast(HubDirectory(tmp_path))).take_weights()
    assert torch.equal(half.w, torch.arange(6.0).bfloat16())


@pytest.mark.parametrize("differ", [False, True])
def test_a_tied_tensor_that_comes_under_both_names_is_compared(tmp_path, differ):
    """The second one must not be read over the first."""
    save_file({"a": torch.arange(4.0), "b": torch.arange(4.0) + differ}, tmp_path / "model.safetensors")
    model = linear(a=torch.zeros(4))
    model.b = model.a
    live = trainfold.attach(model, weights=HubDirectory(tmp_path))
    if differ:
        with pytest.raises(InvalidState, match="to which it is tied"):
            live.take_weights()
    else:
        live.take_weights()
        assert torch.equal(model.b, torch.arange(4.0))


def test_a_source_of_the_users_that_swaps_names_gets_what_it_asks_for(tmp_path):
    """It calls `supply`, which writes into no memory of the model."""
    save_file({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    hub = HubDirectory(tmp_path)

    class Swapped:
        def supply(self, wanted):
            for name, tensor in hub.supply(wanted):
                yield {"a": "b", "b": "a"}[name], tensor

    model = linear(a=torch.full((3,), 7.0), b=torch.full((3,), 7.0))
    trainfold.attach(model, weights=Swapped()).take_weights()
    assert model.a.tolist() == [1.0] * 3
    assert model.b.tolist() == [0.0] * 3


def test_a_file_that_is_cut_short_meanwhile_is_an_error_that_names_it(tmp_path):
    """A map of it would end the process."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(4096.0)}, path)
    memory = torch.zeros(4096)

    def cut(_name):
        path.write_bytes(path.read_bytes()[:8192])
        return memory

    wanted = {"w": Wanted("float32", (4096,), ((0, 4096),))}
    with pytest.raises(CheckpointTorn, match=r"model\.safetensors"):
        list(HubDirectory(tmp_path).supply_into(wanted, cut))


def test_pieces_of_two_threads_are_where_they_belong(tmp_path, monkeypatch):
    """Each thread takes the next piece when it has read one."""
    monkeypatch.setattr(shared_read, "_SHARED_FROM_BYTES", 0)
    monkeypatch.setattr(shared_read, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(shared_read.os, "cpu_count", lambda: 2)
    saved = {f"w{number}": torch.arange(number * 777) for number in range(5)}
    save_file(saved, tmp_path / "model.safetensors")
    memory = {name: torch.empty_like(each) for name, each in saved.items()}
    wanted = {name: Wanted("int64", tuple(each.shape), ((0, len(each)),)) for name, each in saved.items()}
    found = filled(HubDirectory(tmp_path), wanted, memory)
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert all(torch.equal(memory[name], saved[name]) for name in saved)

"""A save, a load and a digest do not change the tensors they read; a leaf comes back exactly, or is refused by name."""

import numpy as np
import pytest
import torch
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.hold.hold import Hold
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CaptureRefused, SaveFailed, UnsupportedLeaf
from trainfold.core.format.codec import leaf_digest
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.state.state import Progress, TrainState
from trainfold.core.tensor_memory import byte_array, tensor_bytes


def make_live():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = {"w": torch.ones(7), "column": torch.ones(3, 3)[:, 1], "flags": torch.ones(3, dtype=torch.bool)}
    live = attach(model, optimizer, extra={"average": (lambda: average, average.update)})
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    live.advance(samples=8)
    slots = [slot for held in optimizer.state.values() for slot in held.values() if isinstance(slot, torch.Tensor)]
    return live, [*model.parameters(), *model.buffers(), *average.values(), *slots]


def save_in(mode, live, store=None, **options):
    with CheckpointManager(store or MemoryStore(), mode=mode, **options) as manager:
        manager.save(live)
        manager.drain()


USES = {
    "a sync save": lambda live: save_in("sync", live),
    "an async save": lambda live: save_in("async", live),
    "an async save that checks": lambda live: save_in("async", live, hold_check=True),
    "an async save without room": lambda live: save_in("async", live, max_extra_bytes=0),
    "a fingerprint": lambda live: fingerprint(live.capture()),
    "a restore": lambda live: live.restore(live.capture()),
    "a digest": lambda live: [leaf_digest(value) for value in live.capture().model.params.values()],
}


@pytest.mark.parametrize("use", USES)
def test_every_storage_can_be_resized_after_it_was_looked_at(use):
    """W17, C14: ``.numpy()`` makes a tensor's storage permanently not resizable, and torch reports it only at a resize."""
    live, tensors = make_live()
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
    USES[use](live)
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)


def test_what_the_audit_and_the_data_probe_look_at_can_be_resized():
    """W17: a buffer that is not persistent, a tensor by attribute, and a batch that the loop was given."""
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(3), persistent=False)
    model.plain = torch.zeros(3)
    live = attach(model, loader=torch.utils.data.DataLoader(torch.zeros(4, 2), batch_size=2))
    batch = next(live.batches())
    live.advance(samples=2)
    save_in("sync", live)
    assert all(each.untyped_storage().resizable() for each in (model.seen, model.plain, batch))


def test_a_tensor_that_was_loaded_can_be_resized():
    store = MemoryStore()
    state = TrainState(trainer=Progress(step=1), extra={"w": torch.ones(5)})
    trainfold.save(state, store)
    found = trainfold.load(store, like=state).extra["w"]
    assert found.untyped_storage().resizable()
    assert found.resize_(9).numel() == 9


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
def test_memory_read_by_address_is_the_tensors_and_keeps_it_alive(shape):
    tensor = torch.ones(shape)
    array, view = byte_array(tensor), tensor_bytes(tensor)
    assert bytes(view) == array.tobytes() == tensor.numpy().tobytes()
    tensor.fill_(2.0)
    wanted = bytes(view)
    assert array.tobytes() == wanted == tensor.numpy().tobytes()
    del tensor
    others = [torch.zeros(shape) for _ in range(50)]
    assert bytes(view) == array.tobytes() == wanted
    assert len(others) == 50


def test_memory_that_was_given_back_while_it_was_held_fails_the_save_and_names_the_leaf():
    """What can be resized can be freed while it is being saved: nothing is read from where it was."""
    weight = torch.ones(1000)
    hold = Hold({("model", "w"): weight})
    weight.untyped_storage().resize_(0)
    with pytest.raises(SaveFailed, match=r"w: expected .*resize_\(0\)"):
        list(hold.pieces(("model", "w"), 64))
    hold.release()


# --- leaves ----------------------------------------------------------------------------------------------------------


def odd_flags():
    return torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "flags",
    [
        odd_flags,
        lambda: odd_flags().view(torch.uint8).repeat(2).view(2, 4).t().view(torch.bool),
        lambda: odd_flags().view(torch.uint8).numpy().view(np.bool_),
    ],
)
@pytest.mark.parametrize("where", ["extra", "buffer"])
def test_a_bool_with_another_byte_than_0_and_1_is_refused_by_name(mode, flags, where):
    """W17: torch makes a 1 of any other byte as soon as it copies it, so it would not come back."""
    made = flags()
    model = nn.Linear(1, 1)
    if where == "buffer":
        model.register_buffer("flags", torch.as_tensor(made))
    live = attach(model, extra={"some": (lambda: {"flags": made if where == "extra" else 0}, lambda _: None)})
    live.advance(samples=1)
    store = MemoryStore()
    with pytest.raises(SaveFailed, match=r"flags.*0 or 1.*byte of (2|255)"):
        save_in(mode, live, store)
    assert not [name for name in store.list("step-00000001") if name.startswith("manifest")]


class Mine(torch.Tensor):
    pass


class MyParameter(nn.Parameter):
    pass


LOSES_ITS_TYPE = {
    "a Parameter": lambda: nn.Parameter(torch.ones(2)),
    "a subclass of Parameter": lambda: MyParameter(torch.ones(2)),
    "a Buffer": lambda: nn.Buffer(torch.ones(2)),
    "an UninitializedParameter": nn.UninitializedParameter,
    "a subclass of Tensor": lambda: torch.ones(2).as_subclass(Mine),
    "a masked array": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "a matrix": lambda: np.ones((2, 2)).view(np.matrix),
    "a record array": lambda: np.rec.array([(1, 2.0)]),
    "a structured array": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    "an array of objects": lambda: np.array([{}, None]),
    "an array of texts": lambda: np.array(["a", "b"]),
    "an array of the other byte order": lambda: np.ones(2, dtype=">f4"),
    "an array of dates": lambda: np.zeros(2, dtype="datetime64[s]"),
}


@pytest.mark.parametrize("kind", LOSES_ITS_TYPE)
def test_a_leaf_whose_type_would_not_come_back_is_refused_by_name(kind, tmp_path):
    """W17, V01: it would come back as a plain tensor or array, without its mask, its fields, or its place in a module."""
    leaf = LOSES_ITS_TYPE[kind]()
    path = r"extra\['a'\]|some\.value\['a'\]|some"
    with pytest.raises(UnsupportedLeaf, match=path) as refused:
        trainfold.save(TrainState(trainer=Progress(step=1), extra={"some": {"a": leaf}}), MemoryStore())
    assert "['a']" in str(refused.value)
    live = attach(nn.Linear(1, 1), extra={"some": (lambda: {"a": leaf}, lambda _: None)})
    with pytest.raises(CaptureRefused, match=r"\['a'\]"):
        live.advance(samples=1)
    state = TrainState(trainer=Progress(step=1), extra={"some": {"a": leaf}})
    for mode in ("sync", "async"):
        with CheckpointManager(tmp_path / mode, mode=mode) as manager, pytest.raises(UnsupportedLeaf, match=r"\['a'\]"):
            manager.save(state)


def test_a_memory_map_is_refused_by_name(tmp_path):
    """It would come back as an array in memory, and what the program writes to it would never reach the file."""
    mapped = np.memmap(tmp_path / "a.bin", dtype="f4", mode="w+", shape=(3,))
    with pytest.raises(UnsupportedLeaf, match=r"\['a'\].*memmap"):
        trainfold.save(TrainState(trainer=Progress(step=1), extra={"some": {"a": mapped}}), MemoryStore())


@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="this torch has no named tensors")
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_a_named_tensor_is_refused_by_name():
    with pytest.raises(UnsupportedLeaf, match=r"\['a'\].*dimension names"):
        trainfold.save(
            TrainState(trainer=Progress(step=1), extra={"some": {"a": torch.ones(2, names=("n",))}}), MemoryStore()
        )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_parameters_of_modules_are_saved_whatever_their_class(mode):
    """A module keeps its own objects at a restore, and only their values are written, so that no type is lost there."""
    model = nn.Module()
    model.w = MyParameter(torch.ones(2))
    model.b = nn.Buffer(torch.zeros(2))
    live = attach(model)
    live.advance(samples=1)
    store = MemoryStore()
    with CheckpointManager(store, mode=mode) as manager:
        manager.save(live)
        manager.drain()
        with torch.no_grad():
            model.w.fill_(5.0)
        manager.restore(live)
    assert type(model.w) is MyParameter
    assert model.w.tolist() == [1.0, 1.0]

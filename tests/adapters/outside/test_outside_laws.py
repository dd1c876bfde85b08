"""Laws of weights from outside: no checkpoint has a byte of them, whatever is selected, frozen, tied or attached beside them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.construct_cases import Net
from torch.optim.swa_utils import AveragedModel

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.sharded.dtensor import named_shards
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.weights import Frozen

OTHERS = ("optimizer", "trainer", "rng", "ema")


class Ones:
    """Supplies what it is asked for."""

    def supply(self, wanted):
        return iter(
            [
                (name, torch.ones(each.shape, dtype=getattr(torch, each.dtype)))
                for name, each in wanted.items()
                if each.tied_to is None
            ]
        )


@settings(deadline=None, max_examples=25)
@given(
    chosen=st.lists(
        st.sampled_from(("linear", "norm", "embedding", "rope", "tied", "shared", "half")), min_size=1, max_size=4
    ),
    frozen=st.sets(st.integers(0, 3)),
    others=st.sets(st.sampled_from(OTHERS)),
    whole=st.booleans(),
    mode=st.sampled_from(["sync", "async"]),
    says=st.sampled_from(["attach", "manager", "neither"]),
)
def test_no_checkpoint_has_a_byte_of_what_comes_from_outside(chosen, frozen, others, whole, mode, says):
    """B03, B16, J05, J06: of the model a checkpoint has exactly the tensors that no source supplies; each byte of it is one of theirs."""
    model = Net(chosen)
    for index in frozen & set(range(len(chosen))):
        model.layers[index].requires_grad_(requires_grad=False)
    named = named_shards(model)
    outside = {name for name, each in named.params.items() if whole or not each.requires_grad}
    source = Ones() if whole else Frozen(Ones()) if outside else None
    trained = [each for each in named.params.values() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if trained else None
    names = None if says == "neither" else sorted({*others, "trainer", *(() if whole else ("model",))})
    live = attach(model, optimizer, extra={"ema": AveragedModel(model)}, weights=source,
                  components=names if says == "attach" else None)  # fmt: skip
    store = MemoryStore()
    with CheckpointManager(store, mode=mode, components=names if says == "manager" else None) as manager:
        manager.restore(live)
        kept = {name: each.detach().clone() for name, each in named.params.items()}
        live.advance(samples=1)
        manager.save(live)
        manager.drain()
        manifest = read_manifest(store, "step-00000001")
        assert ("model" in manifest.omitted) == whole
        saved = manifest.component("model")
        assert (saved is None) == whole
        assert [each for each in manifest.files if "model" in each.components] == [] or not whole
        if saved is not None:
            wanted = {f"model.params[{name!r}]" for name in named.params if name not in outside}
            wanted |= {f"model.buffers[{name!r}]" for name in named.buffers}
            assert {each.path for each in saved.tensors[0]} == wanted
            spans = [shard for each in saved.tensors[0] for shard in each.shards]
            held = {**named.params, **named.buffers}
            mine = [held[path.split("'")[1]] for path in wanted]
            assert sum(shard.stop - shard.start for shard in spans) == sum(each.nbytes for each in mine)
        with torch.no_grad():
            for each in named.params.values():
                each.add_(1)
        assert manager.restore(live).step == 1  # takes the source's again, and the checkpoint's for the others
    assert all(torch.equal(each, kept[name]) for name, each in named.params.items() if name not in outside)
    assert all(bool((named.params[name] == 1).all()) for name in outside if whole)

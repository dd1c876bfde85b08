"""What a save that refers to unchanged leaves reads of the memory of each leaf, counted byte by byte."""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.formats.native import writer
from trainfold.backends.hold.held_leaf import HeldLeaf
from trainfold.backends.runs.reuse import unchanged
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.format.manifest import PIECE_BYTES

PEEK, PIECES, PEEK_DENSE, BYTES = HeldLeaf.peek, HeldLeaf.pieces, unchanged._Dense.peek, writer.tensor_bytes


class Reads:
    """Counts the bytes that are read of tensors, by the names of attached ones, through each way that a save has to them."""

    def __init__(self, names):
        self.names, self.bytes = names, Counter()

    def __enter__(self):
        def peek(leaf, start, memory):
            self.bytes[leaf.name[1]] += len(memory)
            PEEK(leaf, start, memory)

        def pieces(leaf, *arguments, **options):
            for piece in PIECES(leaf, *arguments, **options):
                self.bytes[leaf.name[1]] += len(piece)
                yield piece

        def peek_dense(source, start, memory):
            self.bytes[self.names.get(source._bytes.data_ptr())] += len(memory)
            PEEK_DENSE(source, start, memory)

        def tensor_bytes(tensor):
            self.bytes[self.names.get(tensor.data_ptr())] += tensor.nbytes
            return BYTES(tensor)

        self.patches = [
            mock.patch.object(HeldLeaf, "peek", peek),
            mock.patch.object(HeldLeaf, "pieces", pieces),
            mock.patch.object(unchanged._Dense, "peek", peek_dense),
            mock.patch.object(writer, "tensor_bytes", tensor_bytes),
        ]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self.patches:
            each.stop()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_unchanged_leaf_is_read_once_and_one_that_trains_a_piece_more_than_it_is_written(mode):
    """An async call copies a leaf that no update announces; then it is the copy that is read."""
    model = nn.ModuleDict({name: nn.Linear(1024, 768, bias=False) for name in ("frozen", "trained", "end", "loose")})
    model["frozen"].weight.requires_grad_(requires_grad=False)
    trained = [model["trained"].weight, model["end"].weight]
    live, store = attach(model, torch.optim.SGD(trained, lr=0.1)), MemoryStore()
    names = {each.data_ptr(): f"model.params[{name!r}]" for name, each in model.named_parameters()}
    size = model["frozen"].weight.nbytes
    assert size == 3 * PIECE_BYTES
    found = []
    with CheckpointManager(store, mode=mode, reuse_unchanged=True) as manager:
        for _ in range(3):
            with Reads(names) as reads, torch.no_grad():
                live.advance(samples=1)
                manager.save(live)
                manager.drain()
                found.append({path: reads.bytes[path] for path in names.values()})
                model["trained"].weight.add_(1)
                model["end"].weight[-1, -1] += 1
    assert found[0] == dict.fromkeys(names.values(), size)
    for reads in found[1:]:
        assert reads == {
            "model.params['frozen.weight']": size,
            "model.params['loose.weight']": size,
            "model.params['trained.weight']": size + PIECE_BYTES,
            "model.params['end.weight']": 2 * size,  # its last piece differs
        }
    saved = read_manifest(store, "step-00000003")
    written = {shard.file for each in saved.component("model").tensors[0] for shard in each.shards}
    assert len(written) == 2  # the file of this save, and that of the first one

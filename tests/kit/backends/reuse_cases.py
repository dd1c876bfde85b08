"""Chains of saves that refer to each other, with what each checkpoint must hold."""

from unittest import mock

import torch

import trainfold
from trainfold.backends.hold.hold import Hold
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.reuse import unchanged
from trainfold.backends.runs.save import save_snapshot
from trainfold.backends.runs.scan import examine, read_inventory, read_manifest
from trainfold.backends.runs.snapshot import describe_state
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.tiers.pruner import Pruner
from trainfold.core.format.file_names import directory_of
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard, make_shard
from trainfold.core.save.retention import Saved, keep_last
from trainfold.core.save.reuse.base import NO_BASE, base_from
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

SHAPES = {"large": (300, 1000), "rows": (7, 3), "empty": (0, 4), "scalar": (), "half": (5,), "flags": (6,), "turned": (4, 3)}  # fmt: skip
DTYPES = {"half": torch.bfloat16, "flags": torch.bool}
TIED = "tied"
CUT = {"rows": [[0]], "large": [[0]]}


def value_of(name, version):
    """The tensor of a leaf in one of its versions; the last elements differ, so that a comparison has to read on."""
    shape = SHAPES[name]
    flat = torch.zeros(shape, dtype=DTYPES.get(name, torch.float32)).flatten()
    bits = [version >> bit & 1 for bit in range(min(6, flat.numel()))]
    flat[flat.numel() - len(bits) :] = torch.tensor(bits, dtype=flat.dtype)
    found = flat.reshape(shape)
    return found.t().contiguous().t() if name == "turned" else found


def whole_state(step, versions):
    """A state of which each leaf has a version."""
    params = {name: value_of(name, version) for name, version in versions.items()}
    params[TIED] = params["rows"]
    extra = {"ema": {"w": value_of("half", versions["half"] + 1)}}
    return TrainState(ModelState(Leaves(params), Leaves()), trainer=Progress(step, samples=step), extra=extra)


def state_of(step, versions, ranks, *, cut):
    """What a rank has of it: whole tensors, or some of them cut by rows."""
    state = whole_state(step, versions)
    if not cut:
        return state
    mesh = make_mesh((ranks.world_size,))
    params = dict(state.model.params)
    for name, cuts in CUT.items():
        box = make_placement(mesh, cuts).box(SHAPES[name], (ranks.rank,))
        mine = params[name][tuple(slice(*side) for side in box)].clone()
        params[name] = make_shard(mine, shape=SHAPES[name], starts=tuple(low for low, _ in box))
    params[TIED] = params["rows"]
    return state.evolve(model=ModelState(Leaves(params), Leaves()))


class Chain:
    """A run whose saves refer to each other, on some ranks, and what each of its checkpoints must hold."""

    def __init__(self, ranks=1, *, cut=False, held=False, store=None):
        self.store = MemoryStore() if store is None else store
        self.ranks, self.cut, self.held = ranks, cut, held
        self.bases = [NO_BASE] * ranks
        self.descent = None
        self.expected = {}
        self.written_bytes = []

    def save(self, step, versions):
        """Save on all ranks, with references and in full elsewhere; the fingerprints must be the same."""

        def saved(ranks):
            state = state_of(step, versions, ranks, cut=self.cut)
            if not self.held:
                result = save_snapshot(lambda: describe_state(state), self.store, collectives=ranks, base=self.bases[ranks.rank],
                                       descends_from=self.descent)  # fmt: skip
            else:
                snapshot = describe_state(state)
                hold = Hold(snapshot.named())
                try:
                    result = save_snapshot(lambda: snapshot, self.store, collectives=ranks, hold=hold, base=self.bases[ranks.rank],
                                           descends_from=self.descent)  # fmt: skip
                finally:
                    hold.release()
            return result, trainfold.fingerprint

        def in_full(ranks):
            state = state_of(step, versions, ranks, cut=self.cut)
            return save_snapshot(lambda: describe_state(state), full, collectives=ranks)

        full = MemoryStore()
        with mock.patch.object(unchanged, "LEAST_BYTES", 0):
            found = run_threads(self.ranks, saved)
        whole = run_threads(self.ranks, in_full)[0]
        result = found[0][0]
        assert result.fingerprints == whole.fingerprints
        self.bases = [each.base for each, _ in found]
        self.descent = result.descent
        self.expected[directory_of(step)] = versions
        self.written_bytes.append((result.size_bytes, whole.size_bytes))
        return result

    def restart(self, step):
        """Take what the next save refers to from a checkpoint, as a restore does."""
        manifest = read_manifest(self.store, directory_of(step))
        self.bases = [base_from(manifest, directory_of(step), rank) for rank in range(self.ranks)]
        head = manifest.head
        self.descent = trainfold.core.state.parent_checkpoint.ParentCheckpoint(head.timeline, head.step, head.forks)

    def prune(self, keep, *, left_behind=None):
        """Delete what `keep_last` does not keep."""
        newest = next(iter(trainfold.core.history.inventory.lineage(read_inventory(self.store))))
        saved = Saved(newest.name, newest.head.step, newest.head.timeline)
        Pruner(self.store, keep_last(keep), left_behind).prune(saved, [])

    def names(self):
        return [entry.name for entry in read_inventory(self.store).entries if entry.head is not None]

    def check(self):
        """Every checkpoint that is there is whole, and holds what was saved last under its name."""
        inventory = read_inventory(self.store)
        for name in self.names():
            entry = examine(self.store, inventory, name).entry(name)
            assert entry.problem is None, entry.problem
            for file in entry.manifest.references:
                assert entry.head.step != trainfold.core.format.file_names.step_of(file.checkpoint)
                assert self.store.size(file.path(name)) == file.size_bytes
            wanted = self.expected[name]
            like = TrainState(trainer=Progress())
            state = trainfold.load(self.store, like=like, step=entry.head.step)
            for leaf, value in whole_state(entry.head.step, wanted).model.params.items():
                assert torch.equal(state.model.params[leaf], value), (name, leaf)
            assert state.model.params[TIED] is state.model.params["rows"]
            assert torch.equal(state.extra["ema"]["w"], value_of("half", wanted["half"] + 1))


def parts_equal(state, versions):
    """Whether what a rank has loaded is what it must hold."""
    for name, value in whole_state(1, versions).model.params.items():
        leaf = state.model.params[name]
        mine = value[tuple(slice(*side) for side in leaf.box)] if isinstance(leaf, Shard) else value
        assert torch.equal(leaf.tensor if isinstance(leaf, Shard) else leaf, mine), name

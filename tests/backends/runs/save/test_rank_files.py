"""One data file a rank, and fewer writers than ranks: the files are others, and what is loaded is the same (ADR-0048)."""

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kit.backends.runs_cases import RankFiles

from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs import shared_reads
from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import examine, read_inventory, read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument
from trainfold.core.format.dtypes import size_bytes
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.save.file_layout import header_of
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.stores import FilePreference

pytestmark = pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")
STEP = "step-00000001"
MESHES = [(1,), (2,), (3,), (2, 2), (4,)]
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.uint8]
SHAPES = st.sampled_from([(), (0,), (5,), (0, 3), (4, 6), (7, 3), (3, 700), (90, 500)])
RULES = [None, "listed", [[0]], [[], [0]]]


def preferring(**changes):
    """A store that prefers something."""
    return type("Preferring", (MemoryStore,), {"prefers": FilePreference(**changes)})()


@st.composite
def values(draw, names):
    found = {}
    for name in names:
        shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
        found[name] = torch.arange(torch.Size(shape).numel()).mul(40_503).view(shape).to(dtype)
    return found


def held(value, rule, mesh, rank):
    """What a rank has of a tensor: all of it, or a part by a rule of the mesh, or one that no rule gives."""
    if rule is None or not value.dim() or (len([*rule]) > value.dim() and rule != "listed"):
        return value.clone()
    by = make_placement(mesh, [[0]] if rule == "listed" else rule)
    box = by.box(tuple(value.shape), mesh.coordinate_of(rank))
    part = value[tuple(slice(*side) for side in box)].clone()
    return Shard(part, tuple(value.shape), tuple(low for low, _ in box), placement=None if rule == "listed" else by)


def state_of(tensors, rules, mesh, rank, *, blank=False):
    """The state of a rank: a model, slots, an average, and what it alone has."""

    def mine(component):
        found = {name: held(value, rules[name], mesh, rank) for name, value in tensors[component].items()}
        for each in found.values() if blank else ():
            (each.tensor if isinstance(each, Shard) else each).zero_()
        return found

    slots = {name: {"exp_avg": value} for name, value in mine("optimizer").items()}
    return TrainState(
        ModelState(Leaves(mine("model")), Leaves()),
        OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (ParamGroup({"lr": 0.1}, tuple(slots)),)),
        trainer=Progress(step=1),
        rng={"cpu": torch.full((9,), 0 if blank else rank, dtype=torch.uint8), "rank": rank},
        extra={"ema": mine("ema")},
    )


def whole_of(tensors, states):
    """Every leaf of some states is what was saved, or the part of it that the rank has."""
    for state in states:
        found = {
            "model": state.model.params,
            "optimizer": {name: each["exp_avg"] for name, each in state.optimizer.slots.items()},
            "ema": state.extra["ema"],
        }
        for component, leaves in tensors.items():
            for name, value in leaves.items():
                leaf = found[component][name]
                wanted = value[tuple(slice(*side) for side in leaf.box)] if isinstance(leaf, Shard) else value
                assert torch.equal(leaf.tensor if isinstance(leaf, Shard) else leaf, wanted), (component, name)


def saved(tensors, rules, mesh, store):
    return run_threads(
        mesh.size, lambda world: save(state_of(tensors, rules, mesh, world.rank), store, collectives=world)
    )


def loaded(store, tensors, rules, mesh, components=None):
    def on_rank(world):
        like = state_of(tensors, rules, mesh, world.rank, blank=True)
        policy = {"world": "adapt", "per_rank": "adapt"}
        return load(store, like=like, collectives=world, policy=policy, components=components)

    return run_threads(mesh.size, on_rank)


def wrote(store):
    """Rank -> the bytes of tensors that it wrote, and how many data files."""
    manifest = read_manifest(store, STEP)
    sizes, names = dict.fromkeys(range(manifest.world_size), 0), {}
    for component in manifest.components:
        for record in (record for table in component.tensors for record in table):
            for shard in record.shards:
                sizes[manifest.files[shard.file].rank] += shard.stop - shard.start
    for file in manifest.files:
        names.setdefault(file.rank, []).append(file.name)
    return sizes, names


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_files_of_ranks_load_the_same_bits_as_files_of_components_on_any_ranks(data):
    """With leaves of any dtype, whole, cut by rules or by lists, empty ones among them; all components, or some of them."""
    names = {
        component: data.draw(st.permutations("abc"))[: data.draw(st.integers(1, 3))]
        for component in ("model", "optimizer", "ema")
    }
    tensors = {component: data.draw(values(each)) for component, each in names.items()}
    before, after = (make_mesh(data.draw(st.sampled_from(MESHES))) for _ in range(2))
    rules = [{name: data.draw(st.sampled_from(RULES)) for name in "abc"} for _ in range(2)]
    plain, few = MemoryStore(), RankFiles()
    one, other = saved(tensors, rules[0], before, plain), saved(tensors, rules[0], before, few)
    assert one[0].fingerprints == other[0].fingerprints
    sizes, files = wrote(few)
    assert sizes == wrote(plain)[0]
    assert {rank: len(each) for rank, each in files.items()} == dict.fromkeys(
        range(before.size), 1
    )  # each has a stream
    manifest = read_manifest(few, STEP)
    assert manifest.head.schema_version == 5
    for number, file in enumerate(manifest.files):
        assert few.read(f"{STEP}/{file.name}").startswith(header_of(manifest, number))
    assert read_manifest(plain, STEP).head.schema_version == 3
    assert examine(few, read_inventory(few), STEP).entry(STEP).problem is None
    few.is_shared = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads, "ROUND_BYTES", data.draw(st.sampled_from([5_000, 300_000])))
        whole_of(tensors, loaded(few, tensors, rules[1], after))
    some = data.draw(
        st.sampled_from(
            [("model", "trainer"), ("ema", "trainer"), ("trainer", "rng"), ("model", "optimizer", "trainer")]
        )
    )
    for state in loaded(few, tensors, rules[1], after, components=[*some]):
        whole_of({each: tensors[each] for each in some if each in tensors}, [state])
        assert (
            all(not torch.count_nonzero(getattr(leaf, "tensor", leaf)) for leaf in state.extra["ema"].values())
            or "ema" in some
        )
    event(f"{before.size} to {after.size}")


LARGE = {
    component: {name: torch.arange(800 * 160).mul(40_503).view(800, 160).int() for name in "abc"}
    for component in ("model", "optimizer", "ema")
}


def test_ranks_that_read_for_each_other_keep_no_more_of_files_with_several_components(monkeypatch):
    """Bytes come component by component, although those of another one lie between them."""
    kept, do_round = [], shared_reads.SharedStore._do_round

    def noted(self):
        do_round(self)
        kept.append(sum(map(len, self._came.values())))

    monkeypatch.setattr(shared_reads.SharedStore, "_do_round", noted)
    monkeypatch.setattr(shared_reads, "ROUND_BYTES", 100_000)
    few, rules = RankFiles(), {key: [[0]] for key in "abc"}
    saved(LARGE, rules, make_mesh((2,)), few)
    few.is_shared = True
    whole_of(LARGE, loaded(few, LARGE, dict.fromkeys("abc"), make_mesh((3,))))
    assert len(kept) > 40
    assert max(kept) <= 200_000


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_store_that_prefers_large_objects_has_fewer_writers_and_loads_the_same_bits(data):
    """N05: each element is written once, by ranks that hold it; where all hold it, by no more than can write an object each, whatever the other stores say."""
    tensors = {component: data.draw(values("abc")) for component in ("model", "optimizer", "ema")}
    before, after = (make_mesh(data.draw(st.sampled_from(MESHES))) for _ in range(2))
    rules = [{name: data.draw(st.sampled_from(some)) for name in "abc"} for some in ([None, None, *RULES], RULES)]
    object_bytes = data.draw(st.sampled_from([1, 70_000, 10**6]))
    run = MemoryStore()
    stores = [
        Other(run, FilePreference(data.draw(st.sampled_from([1, 9])), object_bytes if rank == 0 else 77))
        for rank in range(before.size)
    ]
    run_threads(
        before.size,
        lambda world: save(state_of(tensors, rules[0], before, world.rank), stores[world.rank], collectives=world),
    )
    whole_of(tensors, loaded(run, tensors, rules[1], after))
    manifest = read_manifest(run, STEP)
    for component in manifest.components[:2]:
        whole = [record for record in component.tensors[0] if record.placement is None]
        total = sum(size_bytes(record.dtype, record.shape) for record in whole)
        shards = [shard for record in whole if record.shape for shard in record.shards if shard.stop > shard.start]
        ranks = {manifest.files[shard.file].rank for shard in shards}
        assert "listed" in rules[0].values() or len(ranks) <= max(1, total // object_bytes)
        event(f"{len(ranks)} of {before.size} write {component.name}")


class Other:
    """The same run, as a rank with another preference sees it."""

    def __init__(self, store, prefers):
        self._store, self.prefers = store, prefers

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_leaves_in_parts_that_no_rule_gives_have_few_writers_too():
    """The first of the ranks that hold a part writes it, until it has an object."""
    value = torch.arange(60_000)
    state = TrainState(ModelState(Leaves({}), Leaves()), trainer=Progress(step=1))

    def on_rank(world, store):
        half = slice(0, 30_000) if world.rank % 2 == 0 else slice(30_000, 60_000)
        extra = {"ema": {name: Shard(value[half].clone(), (60_000,), (half.start,)) for name in "vw"}}
        save(state.evolve(extra=extra), store, collectives=world)

    sizes = {}
    for object_bytes in (0, 10**6):
        store = preferring(object_bytes=object_bytes)
        run_threads(4, lambda world, store=store: on_rank(world, store))
        sizes[object_bytes] = [wrote(store)[0][rank] for rank in range(4)]
        found = load(
            store,
            like=TrainState(
                ModelState(Leaves({}), Leaves()),
                trainer=Progress(),
                extra={"ema": {name: torch.zeros(60_000).long() for name in "vw"}},
            ),
            policy={"world": "adapt"},
        )
        assert all(torch.equal(each, value) for each in found.extra["ema"].values())
    assert sizes == {0: [240_000] * 4, 10**6: [480_000, 480_000, 0, 0]}


def test_a_store_that_prefers_something_else_fails_the_save_on_all_ranks():
    store = type("Wrong", (MemoryStore,), {"prefers": 5})()
    state = TrainState(trainer=Progress(step=1))
    with pytest.raises(InvalidArgument, match="FilePreference"):
        save(state, store)
    assert store.list() == []

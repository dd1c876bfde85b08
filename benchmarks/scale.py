"""Plans at the size of the largest runs: 10^12 and 10^13 parameters in 100,000 leaves, on 8 to 16,384 ranks. Nothing is written, and one process is enough.

Each figure is that of one rank, by the library's own code: the plan of its files, its index, the root of all, the indexes that it opens at a resume
on another number of ranks, and its reads. Other ranks are simulated by what they would have planned. Some ranks of each world are planned, the
first and the last among them. A save has one plan and one root for all stages of a pipeline, as the library has. A resume is that of a stage alone, as
if it were a run of its own: what a rank opens of other stages is their part of the root (``root secs`` of the save). Norms of queries and keys are not cut.

    python benchmarks/scale.py [--quick] [--json] [--check]

A parameter is five leaves: its weight in bfloat16, and a master, two moments and a step in float32. ``cuts`` are the axes of the mesh along which each
dimension is cut, outermost first. Replicas divide the bytes of leaves that they hold alike; ``balance`` is how far the bytes of a rank are from its
shares of them, and ``spread`` is the most that a rank writes over the mean, which is the balance of the state itself. ``peak`` is memory of Python.
Ranks that share a slow store are those of replicas: ``alone`` and ``shared`` are what all read / what they need, each byte once; what a rank reads, receives, gets along
its row to pass on, and sends is / what it needs. ``round`` is the most that it sends or receives at once.
``but cuts`` is ``read needed`` without up to 1 MiB for each shard through which a cut of the new mesh goes.
"""

import json
import sys
import time
import tracemalloc
from collections import Counter
from functools import cache, lru_cache

import attrs
import torch
from _targets import Target, finish, machine, make_parser

from trainfold.backends.gc_pause import without_collecting
from trainfold.backends.runs.shared_reads import SharedReads, spans_of
from trainfold.core.digest import digest_of
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.file_names import index_name
from trainfold.core.format.indexes.needed import Needs, nothing_needed
from trainfold.core.format.manifest import (
    DIGEST_DIGITS,
    INLINE_BYTES,
    PIECE_BYTES,
    FileRecord,
    Head,
    IndexRecord,
    encode_index,
    encode_manifest,
)
from trainfold.core.format.manifest_reader import decode_manifest
from trainfold.core.format.structure.describe import Described, describe
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.file_preference import NO_PREFERENCE, ONE_A_RANK_FROM, FilePreference
from trainfold.core.layout.leaf_spec import LeafSpec
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.replica_shares import UNIT_BYTES, box_of
from trainfold.core.layout.slices import volume, whole_box
from trainfold.core.leaf_path import component_of_leaf
from trainfold.core.resume.reads import plan_reads
from trainfold.core.resume.resume_plan import ComponentAction, ResumePlan
from trainfold.core.save.save_plan import plan_save
from trainfold.core.save.written import PartDigests, WrittenFile, manifest_of, version_of
from trainfold.core.state.components import components_of
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

AXES = ("dp", "ep", "fsdp", "tp")  # of a stage, the fastest last
DIGEST = "xxh3:" + "0123456789abcdef" * 2
HEAD = Head("run", 1)
LEAVES_A_PARAMETER = 5
OBJECT_BYTES = 64 << 20
MB = 1e6
COLUMN, ROW, CUT = [["tp", "ep", "fsdp"]], [["ep", "fsdp"], ["tp"]], [["ep", "fsdp"]]
EXPERTS = [["ep"], ["fsdp"], ["tp"]]
MODELS = {  # of a layer: name -> shape, cuts
    "dense": {
        "norm1": ((6464,), CUT),
        "qkv": ((3 * 6464, 6464), COLUMN),
        "qkv_bias": ((3 * 6464,), CUT),
        "q_norm": ((128,), []),
        "k_norm": ((128,), []),
        "out": ((6464, 6464), ROW),
        "norm2": ((6464,), CUT),
        "gate": ((17280, 6464), COLUMN),
        "up": ((17280, 6464), COLUMN),
        "down": ((6464, 17280), ROW),
    },
    "experts": {
        "norm1": ((2560,), CUT),
        "qkv": ((3 * 2560, 2560), COLUMN),
        "q_norm": ((128,), []),
        "k_norm": ((128,), []),
        "out": ((2560, 2560), ROW),
        "norm2": ((2560,), CUT),
        "router": ((128, 2560), CUT),
        "gate": ((128, 2560, 5120), EXPERTS),
        "up": ((128, 2560, 5120), EXPERTS),
        "down": ((128, 5120, 2560), EXPERTS),
    },
}


@attrs.frozen
class Layout:
    """A world of ranks: a mesh of the axes for each of some stages."""

    model: str
    layers: int
    stages: int = 1
    dp: int = 1
    ep: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def shape(self):
        """The mesh of a stage."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self):
        """The number of ranks of a stage."""
        return self.dp * self.ep * self.fsdp * self.tp

    @property
    def ranks(self):
        """The number of ranks of all stages."""
        return self.size * self.stages

    @property
    def name(self):
        """The axes with more than one rank."""
        sizes = {"pp": self.stages, **dict(zip(AXES, self.shape, strict=True))}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)

    @property
    def some(self):
        """The ranks that are planned."""
        return sorted({0, 1, self.ranks // 3, self.ranks - 1} & {*range(self.ranks)})

    @property
    def stage(self):
        """A stage, as a world of its own."""
        return attrs.evolve(self, layers=self.layers // self.stages, stages=1)


@lru_cache(maxsize=1)
def nodes(layers, model):
    """Return component -> its structure, which does not depend on how tensors are cut."""
    names = [f"layers.{layer}.{name}.weight" for layer in range(layers) for name in MODELS[model]]
    slots = {name: {key: torch.empty(0) for key in ("exp_avg", "exp_avg_sq", "step")} for name in names}
    empty = [Leaves({name: torch.empty(0) for name in names}) for _ in range(2)]
    group = ParamGroup({"lr": 1e-3}, tuple(names))
    optimizer = OptimizerState("torch.optim.adamw.AdamW", Leaves(slots), (group,), masters=empty[1])
    state = TrainState(model=ModelState(empty[0], Leaves()), optimizer=optimizer, trainer=Progress(step=1))
    return {name: describe(component, name)[0] for name, component in components_of(state).items()}


def described(layout):
    """Return what all ranks together have after `by_rule`: the same on each."""
    kinds = []
    for stage in range(layout.stages):
        mesh, found = make_mesh(layout.shape, first=stage * layout.size), {}
        for name, (shape, cuts) in MODELS[layout.model].items():
            rule = make_placement(mesh, [[AXES.index(axis) for axis in axes] for axes in cuts])
            found[name] = [LeafSpec(dtype, shape, (), rule) for dtype in ("bfloat16", "float32")]
        kinds.append((found, LeafSpec("float32", (), (), make_placement(mesh, []) if layout.stages > 1 else None)))

    def spec(path):
        layer, name = path.partition("layers.")[2].partition(".weight'")[0].split(".")
        found, step = kinds[int(layer) * layout.stages // layout.layers]
        return step if path.endswith("['step']") else found[name][not path.startswith("model.")]

    said = nodes(layout.layers, layout.model)
    found = {name: Described(each.node, {path: spec(path) for path in each.tensors}) for name, each in said.items()}
    generator = {"cpu": torch.zeros(5056, dtype=torch.uint8)}
    return {**found, "rng": describe(generator, "rng")[0]}


@lru_cache(maxsize=2)
def said_of(layout):
    """Return `described`, made once for each world."""
    return described(layout)


def planned(layout, rank, prefers=NO_PREFERENCE):
    """Return the plan of the files of a rank."""
    ranks = [said_of(layout)] * layout.ranks
    return without_collecting(plan_save)(ranks, step=1, only=rank, own={"rng"}, prefers=prefers)


def files_of(layout, prefers=NO_PREFERENCE):
    """Return how many data files a save has, if the other ranks are like the last one."""
    first, last = (len(planned(layout, rank, prefers).files) for rank in (0, layout.ranks - 1))
    return first + last * (layout.ranks - 1)


def written(plan):
    """Return the files of a plan, with digests."""

    def part(placed):
        nbytes = placed.stop - placed.start
        pieces = "0" * DIGEST_DIGITS * -(-nbytes // PIECE_BYTES) if nbytes > PIECE_BYTES else ""
        return PartDigests(DIGEST, pieces, DIGEST if placed.is_first_of_whole else "")

    return {
        file.name: WrittenFile(file.name, file.size_bytes, DIGEST, tuple(map(part, file.tensors)))
        for file in plan.files
    }


def known_by(plan, rank):
    """Return what a rank knows of the manifest after it has written its files."""
    return manifest_of(plan, written(plan), rank=rank, head=HEAD, contract={}, omitted=(), versions={})


@lru_cache(maxsize=512)
def wrote(layout, rank):
    """Return the index of a rank, and the records of its files."""
    known = known_by(planned(layout, rank), rank)
    return without_collecting(encode_index)(known, rank), known.files


def root_of(layout, opened=(), *, room_bytes=0):
    """Return the root; the last rank and those that are opened are real, and the others are like the last one.

    ``room_bytes`` are added to the sizes of their files, so that any index fits them.
    """
    last, first = layout.ranks - 1, known_by(planned(layout, 0), 0)
    files, indexes = list(first.files), []
    data_of_zero = without_collecting(encode_index)(first, 0)
    if len(data_of_zero) > INLINE_BYTES:
        indexes.append(IndexRecord(index_name(0, layout.ranks), 0, len(data_of_zero), digest_of(data_of_zero)))
    digest = digest_of(wrote(layout, last)[0])
    for rank in range(1, layout.ranks):
        is_real = rank in opened
        data, like = wrote(layout, rank if is_real else last)
        indexes.append(
            IndexRecord(index_name(rank, layout.ranks), rank, len(data), digest_of(data) if is_real else digest)
        )
        room = 0 if is_real else room_bytes
        for file in like:
            name = file.name.replace(f"-{file.rank:05d}-of-", f"-{rank:05d}-of-")
            files.append(FileRecord(name, file.components, rank, file.size_bytes + room, file.digest))
    components = tuple(attrs.evolve(each, fingerprint=DIGEST) for each in first.components)
    head = attrs.evolve(first.head, schema_version=version_of(files))
    whole = attrs.evolve(first, head=head, components=components, files=tuple(files), indexes=tuple(indexes))
    return without_collecting(encode_manifest)(whole)


@lru_cache(maxsize=1)
def roomy_root(layout):
    """Return a root that any index fits, made once for each world."""
    return root_of(layout, room_bytes=2**45)


class Opened(dict):
    """The indexes of ranks, as if another rank had sent them; it holds those that were asked for."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def get(self, rank, default=None):
        """Return the index of a rank; rank 0 has none, because it is in the root."""
        if rank and rank not in self:
            found = json.loads(wrote(self.layout, rank)[0])
            self[rank] = {"own": found["own"], "shards": found["shards"]}
        return super().get(rank, default)


def timed(action):
    """Return what an action gives, and its seconds of CPU time."""
    began = time.process_time()
    found = action()
    return found, time.process_time() - began


def peak_mb(action):
    """Return the most memory of Python in an action."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1] / MB
    finally:
        tracemalloc.stop()


def shares(layout, rank):
    """Return the bytes that a rank would write if replicas shared to a byte, and those of leaves that have replicas."""
    total, copied = 0.0, 0.0
    for name, each in said_of(layout).items():
        for spec, count in Counter(each.tensors.values()).items() if name != "rng" else ():
            rule = spec.placement
            if spec.shape and (rule is None or rule.mesh.coordinate_of(rank) is not None):
                replicas = layout.ranks if rule is None else rule.at(rule.mesh.coordinate_of(rank)).replicas
                nbytes = volume(box_of(spec, rank)) * STORED[spec.dtype].itemsize * count / replicas
                total, copied = total + nbytes, copied + nbytes * (replicas > 1)
    return total, copied


def save_row(layout):
    """Measure the save of a world."""
    secs, sizes, off, ratios = [], [], [], []
    said_of(layout)
    planned(layout, 0)  # what is computed once for each shape
    for rank in layout.some:
        plan, took = timed(lambda rank=rank: planned(layout, rank))
        secs.append(took)
        nbytes = sum(
            placed.stop - placed.start
            for file in plan.files
            for placed in file.tensors
            if placed.shape and component_of_leaf(placed.path) != "rng"
        )
        share, copied = shares(layout, rank)
        if copied >= 50 * UNIT_BYTES:  # replicas differ by a unit at most, whatever they hold
            off.append(abs(nbytes - share) / copied)
        sizes.append(plan.size_bytes)
        if rank:
            ratios.append(len(wrote(layout, rank)[0]) / plan.size_bytes)
    root = root_of(layout)
    read = lambda _name, _size: wrote(layout, 0)[0]  # noqa: E731 - of rank 0, if it is not in the root
    _, root_secs = timed(
        lambda: without_collecting(decode_manifest)(
            root, "step-00000001", read=read, needs=nothing_needed(most_files=0)
        )
    )
    return {
        "model": layout.model,
        "ranks": layout.ranks,
        "mesh": layout.name,
        "leaves": sum(len(each.tensors) for each in said_of(layout).values()),
        "file_gb": sizes[-1] / 1e9,
        "plan_secs": min(secs),
        "peak_mb": peak_mb(lambda: planned(layout, layout.ranks - 1)),
        "balance": max(off, default=0.0),
        "spread": max(sizes) * len(sizes) / sum(sizes),
        "files": files_of(layout),
        "of_parts": files_of(layout, FilePreference(2**62)),
        "root_mb": len(root) / MB,
        "root_secs": root_secs,
        "index_ratio": max(ratios, default=0.0),
    }


def writers_row(layout):
    """Measure who writes what of a model of which all ranks hold all, where a store prefers large objects."""
    row = {"model": layout.model, "ranks": layout.ranks, "mesh": layout.name}
    for name, prefers in (("", NO_PREFERENCE), ("large_", FilePreference(object_bytes=OBJECT_BYTES))):
        sizes = {rank: bytes_written(layout, rank, prefers) for rank in {0, 1, 2, layout.ranks - 1}}
        low, high = 0, layout.ranks  # the first ones write
        while high - low > 1:
            middle = (low + high) // 2
            sizes[middle] = bytes_written(layout, middle, prefers)
            low, high = (middle, high) if sizes[middle] else (low, middle)
        row |= {f"{name}writers": high, f"{name}mb": sizes[low] / MB, f"{name}spread": max(sizes.values()) / sizes[low]}
    return row


def bytes_written(layout, rank, prefers):
    """Return what a rank writes of the weights."""
    plan = planned(layout, rank, prefers)
    return sum(
        each.stop - each.start
        for file in plan.files
        for each in file.tensors
        if component_of_leaf(each.path) == "model"
    )


def resume_row(old, new):
    """Measure the resume of a rank on another world."""
    row = resume_of(old.stage, new.stage, new.size // 3)
    return {"model": old.model, "from": old.ranks, "ranks": new.ranks, "mesh": new.name, **row}


class Resuming:
    """One rank of a new world, and what it needs of the checkpoint of an old one."""

    def __init__(self, old, new, rank):
        specs = {
            path: spec for name, each in said_of(new).items() if name != "rng" for path, spec in each.tensors.items()
        }
        known = cache(lambda spec: box_of(spec, rank))
        self.boxes = {path: None if spec.placement is None else known(spec) for path, spec in specs.items()}
        self.needed = sum(
            volume(whole_box(spec.shape) if self.boxes[path] is None else self.boxes[path])
            * STORED[spec.dtype].itemsize
            for path, spec in specs.items()
        )
        self.targets = {
            name: {path: self.boxes[path] for path in said_of(new)[name].tensors} for name in ("model", "optimizer")
        }
        self.needs = Needs(rank, new.size, lambda _component, path, _shape: self.boxes.get(path))
        self.read = lambda name, _: wrote(old, int(name.split("-")[1]))[0]
        self.asked = Opened(old)
        needs = attrs.evolve(self.needs, opened=self.asked)
        decode_manifest(roomy_root(old), "step-00000001", read=self.read, needs=needs)
        self.root = root_of(old, self.asked)

    def opened(self):
        """Return the manifest, as the rank opens it."""
        return without_collecting(decode_manifest)(self.root, "step-00000001", read=self.read, needs=self.needs)

    def plan(self, manifest):
        """Return the plan of its reads."""
        actions = tuple(ComponentAction(name, "load") for name in ("model", "optimizer", "trainer"))
        plan = ResumePlan("run", "step-00000001", manifest, actions, (), ())
        return without_collecting(plan_reads)(plan, self.targets)


def resume_of(old, new, rank):
    """Measure the resume of one rank."""
    resuming = Resuming(old, new, rank)
    manifest, open_secs = timed(resuming.opened)
    reads, read_secs = timed(lambda: resuming.plan(manifest))
    spans, asked = bytes_of(reads), resuming.asked
    return {
        "open_secs": open_secs,
        "indexes": len(asked),  # of other ranks than 0
        "index_mb": sum(len(wrote(old, number)[0]) for number in asked) / MB,
        "reads_secs": read_secs,
        "reads": sum(len(read.shards) for each in reads.components.values() for read in each.tensors.values()),
        "twice": reads.size_bytes / spans,
        "peak_mb": peak_mb(lambda: resuming.plan(resuming.opened())),
        "read_needed": spans / resuming.needed,
        "but_cuts": (spans - sum(min(beyond, PIECE_BYTES) for beyond in beyond_needs(reads))) / resuming.needed,
    }


def bytes_of(reads):
    """Return the bytes of a plan of reads, each once."""
    return sum(stop - start for each in reads.ranges.values() for start, stop in each)


class Rest:
    """The other ranks of a world that share a slow store, as one of them sees them. Bytes that they would send are not there; they are counted."""

    def __init__(self, rank, plans, needs, spans_of):
        self.rank, self.world_size = rank, len(needs)
        self.spans = [spans_of(each) for each in plans]
        told = [(digest_of(canonical_json(each)), len(each)) for each in self.spans]
        self.needs, self.told = needs, [(told[each], None) for each in needs]
        self.came, self.groups, self.nothing = {}, {}, memoryview(bytearray(1))

    def gather(self, value, *, doing="", is_vote=False):
        """Return what each rank has."""
        del value, is_vote
        if doing == "plan what it reads":
            return self.told
        if doing == "name what it reads":
            return [self.spans[each] if self.needs.index(each) == rank else [] for rank, each in enumerate(self.needs)]
        return [(None, None)] * self.world_size

    def exchange(self, parts, sizes, *, among=None, doing=""):
        """Count what goes and comes."""
        del doing
        group = range(self.world_size) if among is None else among
        count = self.groups.setdefault(group, {"sent": 0, "received": 0, "most": 0})
        sent = sum(len(part) for each in parts for part in each)
        count["sent"] += sent
        count["received"] += sum(sizes)
        count["most"] = max(count["most"], sent, sum(sizes))
        return [bytes(size) if size else b"" for size in sizes]


class Counted:
    """A slow store of which a rank reads nothing; it is counted."""

    is_shared, url = True, "counted"

    def __init__(self):
        self.read_bytes = 0

    def read_into(self, name, buffer, *, start=0):
        """Count it."""
        del name, start
        self.read_bytes += len(buffer)


def share_row(old, new):
    """Measure a load in which ranks that need the same read for each other: by what one rank does, in the library's own code, without the bytes."""
    cuts = new.fsdp * new.tp
    resuming = [Resuming(old, new, rank) for rank in range(cuts)]
    manifests = [each.opened() for each in resuming]
    plans = [each.plan(manifest) for each, manifest in zip(resuming, manifests, strict=True)]
    rank = new.size // 3
    needs = [each % cuts for each in range(new.size)]
    manifest, plan = manifests[needs[rank]], plans[needs[rank]]
    rest = Rest(rank, plans, needs, lambda each: spans_of(each, manifest))
    store = Counted()
    found = {"rounds": 0, "read": 0}

    def close():
        begun()[0].gen.close()

    def begun():
        sharing = SharedReads(store, rest).planned(manifest, lambda: plan)
        return sharing, sharing.__enter__()[1]

    def shared(each):
        while (ranges := each._next) is not None:  # noqa: SLF001 - what all ranks do in a round
            found["read"] += sum(one.size_bytes for one in ranges)
            found["rounds"] += 1
            each._do_round()  # noqa: SLF001 - as above
            each._came.clear()  # noqa: SLF001 - what has come is read at once

    plan_secs = min(timed(begun)[1] for _ in range(3))
    sharing, source = begun()
    _, round_secs = timed(lambda: shared(source))
    sharing.__exit__(None, None, None)
    needed, whole = bytes_of(plan), union_of(rest.spans)
    along = [count for group, count in rest.groups.items() if group.step == 1 and len(rest.groups) > 1]
    return {
        "model": new.model,
        "ranks": new.ranks,
        "mesh": new.name,
        "needed_gb": needed / 1e9,
        "alone": needed * new.ranks / whole if cuts == 1 else sum(map(bytes_of, plans)) * new.dp / whole,
        "shared": found["read"] / whole,
        "read": store.read_bytes / needed,
        "received": sum(count["received"] for count in rest.groups.values()) / needed,
        "passed on": sum(count["received"] for count in along) / needed,
        "sent": sum(count["sent"] for count in rest.groups.values()) / needed,
        "sockets": sum(len(group) - 1 for group in rest.groups),
        "round_mb": max(count["most"] for count in rest.groups.values()) / MB,
        "rounds": found["rounds"],
        "round_ms": 1e3 * round_secs / found["rounds"],
        "plan_secs": plan_secs,
        "peak_mb": peak_mb(close),
    }


def union_of(lists):
    """Return the bytes that lists of spans have, each once."""
    total, file, end = 0, -1, 0
    for number, start, stop in sorted({span for spans in lists for span in spans}):
        if number != file:
            file, end = number, 0
        total, end = total + max(0, stop - max(start, end)), max(end, stop)
    return total


def beyond_needs(reads):
    """Yield how many bytes of each shard are read that are not needed: where a cut goes through it."""
    for each in reads.components.values():
        for tensor in each.tensors.values():
            nbytes, boxes = Counter(), {}
            for read in tensor.shards:
                nbytes[read.shard] += read.stop - read.start
                boxes[read.shard] = read.box
            itemsize = STORED[tensor.record.dtype].itemsize
            yield from (count - volume(boxes[shard]) * itemsize for shard, count in nbytes.items())


def worlds(layers):
    """Return the worlds of saves, and pairs of worlds of resumes."""

    def dense(stages, *sizes):
        return Layout("dense", layers, stages, **dict(zip(("dp", "fsdp", "tp"), sizes, strict=True)))

    def experts(stages, *sizes):
        return Layout("experts", layers, stages, **dict(zip(("ep", "fsdp", "tp"), sizes, strict=True)))

    from_dense, from_experts = dense(8, 4, 64, 8), experts(8, 16, 16, 8)
    saves = [
        dense(1, 1, 8, 1), dense(1, 1, 8, 8), dense(8, 1, 8, 8), dense(8, 4, 16, 8), from_dense,
        experts(8, 8, 8, 1), experts(8, 16, 4, 8), from_experts,
    ]  # fmt: skip
    resumes = [
        (from_dense, dense(8, 3, 64, 8)), (from_dense, dense(8, 4, 48, 8)), (from_dense, dense(8, 1, 64, 4)),
        (from_experts, experts(8, 16, 12, 8)), (from_experts, experts(8, 8, 8, 4)),
    ]  # fmt: skip
    few = min(layers, 4)  # of a model that a rank has room for
    writers = Layout("dense", few, fsdp=8, tp=8)
    shares = [Layout("dense", few, dp=ranks) for ranks in (512, 2_048, 16_384)]
    shares += [Layout("dense", few, dp=2_048, tp=8), Layout("dense", few, dp=256, fsdp=8, tp=8)]
    return saves, resumes, [(writers, each) for each in shares]


def main():
    """Measure and print."""
    options = make_parser(__doc__, quick="16 layers on 8 and 64 ranks").parse_args()
    around = machine()
    layers = 16 if options.quick else 2000
    saves, resumes, shares = worlds(layers)
    if options.quick:
        old = Layout("dense", layers, 2, dp=2, fsdp=4, tp=4)
        saves, resumes = [Layout("dense", layers, fsdp=8), old], [(old, attrs.evolve(old, fsdp=3))]
        shares = [(Layout("dense", 1, fsdp=2), Layout("dense", 1, dp=512))]
    rows = [save_row(layout) for layout in saves]
    moved = [resume_row(*pair) for pair in resumes]
    shared = [share_row(*pair) for pair in shares]
    wrote_by = [writers_row(layout) for _, layout in shares if layout.dp == layout.ranks]
    opened = "reading the root and the indexes, of a rank, CPU s"
    targets = [
        Target("plan of a save, of a rank, CPU s", most(rows, "plan_secs"), "<=", 0.2),
        Target(opened, most(moved, "open_secs"), "<=", 0.2),
        Target("plan of reads, of a rank, CPU s", most(moved, "reads_secs"), "<=", 0.2),
        Target("peak of either plan, MB", max(most(rows, "peak_mb"), most(moved, "peak_mb")), "<=", 200),
        Target("bytes of replicated leaves / share of a rank - 1", most(rows, "balance"), "<=", 0.02),
        Target("bytes read by a rank / the same, each once", most(moved, "twice"), "<=", 1.0),
        Target("bytes read by ranks, but 1 MiB a cut / bytes that they need", most(moved, "but_cuts"), "<=", 1.02),
        Target("root, MB", most(rows, "root_mb"), "<=", 16),
        Target("index / files of its rank", most(rows, "index_ratio"), "<=", 0.001),
        Target(
            "data files / ranks, of 1,024 and more",
            max((row["files"] / row["ranks"] for row in rows if row["ranks"] >= ONE_A_RANK_FROM), default=0.0),
            "<=",
            1.0,
        ),
        Target(
            "ranks that write weights, where 64 MiB are preferred / 64 MiB in them",
            most(wrote_by, "large_writers") * OBJECT_BYTES / weights_bytes(shares),
            "<=",
            1.0,
        ),
        Target(
            "bytes that ranks which share a store read of it / bytes that they need, each once",
            most(shared, "shared"),
            "<=",
            1.05,
        ),
        Target("plan of shared reads, of a rank, CPU s", most(shared, "plan_secs"), "<=", 0.2),
        Target("peak of that plan, MB", most(shared, "peak_mb"), "<=", 200),
        Target("what a rank sends or receives at once of shared reads, MB", most(shared, "round_mb"), "<=", 67.2),
    ]
    table = [*listed("save on", rows), "", *listed("resume on", moved), "", *listed("share reads on", shared)]
    table += ["", *listed("weights of replicas on", wrote_by)]
    found = {"machine": around, "saves": rows, "resumes": moved, "shared": shared, "writers": wrote_by}
    return finish(options, found, targets, table)


def weights_bytes(shares):
    """Return the bytes of the weights of which all ranks hold all."""
    specs = said_of(shares[0][1])["model"].tensors.values()
    return sum(volume(whole_box(spec.shape)) * STORED[spec.dtype].itemsize for spec in specs)


def most(rows, key):
    """Return the largest figure of a column."""
    return max(row[key] for row in rows)


def listed(title, rows):
    """Return the lines of a table."""
    keys = [key for key in rows[0] if key not in ("model", "ranks", "mesh", "from")]
    heads = [key.replace("_", " ") for key in keys]
    yield f"{title:46}" + "".join(f"{head:>15}" for head in heads)
    for row in rows:
        before = f" from {row['from']:,}" if "from" in row else ""
        name = f"{row['ranks']:,}{before}, {row['model']}: {row['mesh']}"
        yield f"{name:46}" + "".join(f"{row[key]:>15.4g}" for key in keys)


if __name__ == "__main__":
    sys.exit(main())

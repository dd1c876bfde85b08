"""Checkpoints of several ranks that were changed: what `verify` passes any number of ranks loads, and nothing wrong is ever loaded."""

import json
import random
import shutil

import pytest
import torch
from crash.effort import IS_SOAK
from kit.core.roots import resealed

import trainfold
from trainfold.adapters.cli.diff import diff_checkpoints
from trainfold.adapters.cli.inspect import inspect_checkpoint
from trainfold.adapters.cli.verify import verify_checkpoint
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import TrainfoldError
from trainfold.core.layout.file_preference import FilePreference
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Opaque, PerRank, Progress, TrainState

RANKS = 2
FLIPS = 20_000 if IS_SOAK else 36
CHANGES = 50_000 if IS_SOAK else 90
CUTS = {"rows": [[0]], "columns": [[], [0]], "few": [[0]], "large": [[0]]}
NUMBERS = (0, 1, -1, 2, 3, 8, 4096, 2**31, 2**53, 2**62, 2**63, 10**30, 0.5, True, None)
TEXTS = ("", "model", "extra", "float64", "int32", "bool", "uint8", "\n\x1b[2J", "x" * 300)

pytestmark = [pytest.mark.slow(4), pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.ResumeDrift")]


def part_of(value, cuts, rank, size):
    box = make_placement(make_mesh((size,)), cuts).box(tuple(value.shape), (rank,))
    rule = make_placement(make_mesh((size,)), cuts)
    return Shard(
        value[tuple(slice(*side) for side in box)].clone(),
        tuple(value.shape),
        tuple(low for low, _ in box),
        placement=rule,
    )


def values(fill=None):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "rows": (5, 3),
        "columns": (3, 4),
        "few": (1,),
        "large": (600, 1000),
        "whole": (3,),
        "scalar": (),
        "empty": (0, 3),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["half"] = torch.randn(4, generator=generator).bfloat16()
    return made if fill is None else {name: torch.full_like(value, fill) for name, value in made.items()}


def state_of(rank, size, fill=None):
    made = values(fill)
    params = {
        name: part_of(value, CUTS[name], rank, size) if name in CUTS and size > 1 else value
        for name, value in made.items()
    }
    return TrainState(
        model=ModelState(Leaves(params), Leaves()),
        trainer=Progress(step=1),
        rng=Opaque({"bits": torch.full((4,), rank, dtype=torch.uint8)}),
        extra={
            "meter": PerRank(Opaque({"n": rank, "t": torch.full((2,), float(rank))})),
            "tree": {"a": [1, made["whole"]]},
        },
    )


class Checkpoint:
    """A checkpoint of two ranks in a folder, which is changed and put back."""

    def __init__(self, folder, prefers):
        self.run, self.other = folder / "run", folder / "other"
        store = LocalStore(self.run, prefers=prefers)
        run_threads(RANKS, lambda world: trainfold.save(state_of(world.rank, RANKS), store, collectives=world))
        self.folder = self.run / "step-00000001"
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.index = next(name for name in self.files if name.startswith("index"))
        shutil.copytree(self.run, self.other)

    def put(self, files):
        for name, data in files.items():
            (self.folder / name).write_bytes(data)

    def verified(self):
        return verify_checkpoint(self.folder).error

    def loaded(self, size):
        """Load on ranks; return whether every bit is as it was."""
        names = None if size == RANKS else ["model", "trainer", "tree"]

        def on_rank(world):
            like = state_of(world.rank, size, fill=9)
            found = trainfold.load(self.run, like=like, step=1, components=names, collectives=world)
            wanted = state_of(world.rank, size)
            leaves = [(found.model.params[name], leaf) for name, leaf in wanted.model.params.items()]
            paths = (("rng", "value", "bits"), ("extra", "meter", "value", "value", "t")) if names is None else ()
            leaves += [(held(found, *path), held(wanted, *path)) for path in paths]
            plain = [[each.tensor if isinstance(each, Shard) else each for each in pair] for pair in leaves]
            return all(isinstance(mine, torch.Tensor) and torch.equal(mine, theirs) for mine, theirs in plain)

        return all(run_threads(size, on_rank))


@pytest.fixture(
    scope="module",
    params=[1024, pytest.param(1, marks=pytest.mark.long)],
    ids=["files of components", "files of ranks"],
)
def checkpoint(request, tmp_path_factory):
    return Checkpoint(tmp_path_factory.mktemp("changed"), FilePreference(request.param))


def held(value, *path):
    """What is at a path of attributes and keys; None if it is not there."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return value


def outcome(read):
    """What a reader returns, or its error; any other exception fails the test."""
    try:
        return read()
    except TrainfoldError as error:
        return error


def test_every_flipped_bit_of_every_file_is_found_by_verify_and_never_loaded(checkpoint):
    """U05, X04: roots, indexes, headers, tensors and what is between them."""
    drawn = random.Random(0)
    for number in range(FLIPS):
        name = sorted(checkpoint.files)[number % len(checkpoint.files)]
        data = bytearray(checkpoint.files[name])
        data[drawn.randrange(min(len(data), drawn.choice((64, 5000, len(data)))))] ^= 1 << drawn.randrange(8)
        checkpoint.put({name: bytes(data)})
        try:
            assert outcome(checkpoint.verified) is not None, f"flip {number} of {name}"
            for size in (1, RANKS, 3)[number % 3 :][:1]:
                assert outcome(lambda size=size: checkpoint.loaded(size)) is not False, (
                    f"flip {number} of {name} is loaded"
                )
        finally:
            checkpoint.put({name: checkpoint.files[name]})


def place_in(document, drawn):
    holder, key, at = None, None, document
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        if not keys or (holder is not None and drawn.random() < 0.12):
            return holder, key
        holder, key = at, drawn.choice(list(keys))
        at = holder[key]


def near(held, drawn):
    """Another value, of the same kind or not."""
    if type(held) is int:
        return drawn.choice((held + 1, held - 1, held * 2, held + 4096, drawn.choice(NUMBERS)))
    if type(held) is str:
        return drawn.choice((held + "x", held[:-1], held[::-1], drawn.choice(TEXTS)))
    if type(held) is list and held:
        return drawn.choice((held[:-1], held[1:], held + held[:1], held[::-1], [], [held]))
    if type(held) is dict and held:
        key = drawn.choice(list(held))
        return drawn.choice(({k: v for k, v in held.items() if k != key}, {**held, "odd": 1}, held[key], {}))
    return drawn.choice((*NUMBERS, [], {}, "x"))


def changed(checkpoint, drawn):
    """The root and the index of the second rank with a few changes, and digests that fit."""
    names = ("manifest.json", checkpoint.index)
    documents = {name: json.loads(checkpoint.files[name]) for name in names}
    for _ in range(drawn.choice((1, 1, 2))):
        document = documents[drawn.choice(names)]
        parts = [each for key, each in document.items() if isinstance(each, dict | list) and each and key != "contract"]
        holder, key = place_in(drawn.choice(parts), drawn)
        holder[key] = near(holder[key], drawn)
    index = json.dumps(documents[checkpoint.index], separators=(",", ":")).encode()
    rows = documents["manifest.json"]["indexes"]
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("name") == checkpoint.index:
            row |= {"size_bytes": len(index), "digest": digest_of(index)}
    return {"manifest.json": resealed(documents["manifest.json"]), checkpoint.index: index}


def readers_of(checkpoint):
    return {
        "verify": checkpoint.verified,
        "inspect": lambda: inspect_checkpoint(checkpoint.folder, tensors=True),
        "diff": lambda: diff_checkpoints(checkpoint.folder, checkpoint.other / "step-00000001"),
        **{f"load on {size}": lambda size=size: checkpoint.loaded(size) for size in (1, RANKS, 3)},
    }


def is_of_bytes(found):
    """Whether a reader refuses more than what a structure says, such as a class that is not known here, or other leaves than are wanted."""
    return isinstance(found, TrainfoldError) and type(found).__name__ not in ("UnsupportedLeaf", "ResumeRefused")


def test_what_verify_passes_any_number_of_ranks_loads_and_every_other_reader_reads_or_refuses(checkpoint):
    """U05, X03, X04: changes of the root and of an index whose digests fit, as an attacker or a defect of a writer would make them."""
    passed = believed = 0
    for number in range(CHANGES):
        drawn = random.Random(number)
        try:
            files = changed(checkpoint, drawn)
        except (KeyError, TypeError, IndexError):
            continue
        checkpoint.put(files)
        try:
            store = LocalStore(checkpoint.run)
            if isinstance(outcome(lambda store=store: read_manifest(store, "step-00000001")), TrainfoldError):
                continue
            believed += 1
            found = {name: outcome(read) for name, read in readers_of(checkpoint).items()}
            if found["verify"] is None:
                passed += 1
                odd = {name: each for name, each in found.items() if each is False or is_of_bytes(each)}
                assert not odd, (number, odd)
        finally:
            checkpoint.put({name: checkpoint.files[name] for name in files})
    assert believed > CHANGES // 50
    assert passed > CHANGES // 100

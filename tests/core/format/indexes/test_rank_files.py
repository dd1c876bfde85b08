"""Version 5 of the manifest: files with tensors of several components. What contradicts itself is refused, and a reader that opens few indexes knows what it knows."""

import json

import attrs
import pytest
import torch
from kit.backends.runs_cases import RankFiles
from kit.core.roots import resealed

from trainfold.backends.formats.native.header_check import HeaderCheck
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.runs.scan import read_manifest, read_root
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, FutureVersion
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.manifest import encode_manifest
from trainfold.core.format.manifest_reader import check_structures, decode_first_line, decode_manifest
from trainfold.core.format.upgrade import upgraded
from trainfold.core.history.recognise import file_checks
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.save.file_layout import header_of, stored_in
from trainfold.core.state.state import Opaque, PerRank, Progress, TrainState

STEP = "step-00000001"
NONE = torch.zeros(
    0, dtype=torch.uint8
)  # of several components at one place in a file: the header has them in the order of the state
RULE = make_placement(make_mesh((3,)), [[0]])


def saved(ranks=3):
    """A checkpoint of ranks: an average that is cut, biases of which no part is empty, and what each rank has of its own."""
    store = RankFiles()

    def on_rank(world):
        rows = torch.arange(18.0).reshape(6, 3)
        low, high = 2 * world.rank, 2 * world.rank + 2
        cut = rows if ranks == 1 else Shard(rows[low:high].clone(), (6, 3), (low, 0), placement=RULE)
        meter = PerRank(Opaque({"none": NONE, "t": torch.full((5,), world.rank, dtype=torch.uint8)}))
        extra = {
            "ema": {"w": cut, "none": torch.zeros(0), "few": NONE},
            "bias": {"w": cut, "none": torch.zeros(0), "few": NONE},
            "meter": meter,
        }
        save(TrainState(trainer=Progress(step=1), extra=extra), store, collectives=world)

    run_threads(ranks, on_rank)
    return store


@pytest.fixture(scope="module")
def run():
    return saved()


@pytest.fixture(scope="module")
def root():
    return read_root(saved(1), STEP)


def test_what_is_written_is_what_is_read(root):
    whole = decode_manifest(root, "m")
    check_structures(whole, "m")
    assert whole.head.schema_version == 5
    assert [(file.name, file.components) for file in whole.files] == [
        ("rank-00000-of-00001.safetensors", ("ema", "bias", "meter"))
    ]
    assert encode_manifest(whole) == root
    assert decode_first_line(root, "m") == (whole.head, whole.summary)
    with pytest.raises(AssertionError):
        encode_manifest(attrs.evolve(whole, head=attrs.evolve(whole.head, schema_version=4)))


def test_an_older_release_refuses_it_by_its_version(root):
    """R10: loudly, and with what to do."""
    document = json.loads(root)
    with pytest.raises(FutureVersion, match="upgrade trainfold"):
        upgraded(document, "m", current=4)


HOSTILE = {
    "no component": lambda d: d["files"][0].update(components=[]),
    "a component twice": lambda d: d["files"][0].update(components=["ema", "bias", "meter", "ema"]),
    "one too few": lambda d: d["files"][0].update(components=["ema", "meter"]),
    "text": lambda d: d["files"][0].update(components="ema"),
    "a number": lambda d: d["files"][0].update(components=[7]),
    "a path": lambda d: d["files"][0].update(components=["../x", "ema", "bias", "meter"]),
    "the field of version 4": lambda d: d["files"][0].update(component="ema"),
    "that field alone": lambda d: d["files"][0].update(component=d["files"][0].pop("components")[0]),
    "two files of a rank with one component": lambda d: d["files"].append({**d["files"][0], "name": "b", "components": ["bias"]}),
    "the same bytes for two components": lambda d: d["index"]["shards"]["bias"][0].__setitem__(1, d["index"]["shards"]["ema"][0][1]),
    "version 4": lambda d: d.update(schema_version=4),
    "no references": lambda d: d.pop("references"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_root_with_a_fitting_digest_is_refused(root, name):
    """U04, U05."""
    changed = json.loads(root)
    HOSTILE[name](changed)
    if name == "two files of a rank with one component":
        changed["size_bytes"] *= 2
    with pytest.raises(CheckpointHostile):
        check_structures(decode_manifest(resealed(changed), "m"), "m")


def test_bytes_of_two_components_that_a_rank_does_not_need_must_not_overlap_either(run):
    """U05: a rank that opens an index reads the places of all that is in it."""
    data = {name: run.read(f"{STEP}/{name}") for name in run.list(STEP)}
    name = "index-00001-of-00003.json"
    index = json.loads(data[name])
    index["shards"]["bias"][0][1] = index["shards"]["ema"][0][1]
    data[name] = json.dumps(index).encode()
    document = json.loads(data["manifest.json"])
    (row,) = (each for each in document["indexes"] if each["name"] == name)
    row |= {"size_bytes": len(data[name]), "digest": digest_of(data[name])}
    needs = Needs(1, 3, lambda component, _, shape: None if component == "meter" else ((0, 0),) * len(shape))
    read = lambda name, _: data.get(name)
    assert decode_manifest(
        run.read(f"{STEP}/manifest.json"), "m", read=lambda name, _: run.read(f"{STEP}/{name}"), needs=needs
    ).others
    with pytest.raises(CheckpointHostile, match="overlap"):
        decode_manifest(resealed(document), "m", read=read, needs=needs)


def test_a_rank_that_was_sent_a_part_of_an_index_does_not_take_it_for_all_of_the_file(run):
    """Of another rank's file it knows what that rank has of its own, and no more; of those that it has opened, it knows the header byte by byte."""
    whole = read_manifest(run, STEP)
    sent = {rank: {"own": {"meter": own["own"]["meter"]}, "shards": {"meter": own["shards"]["meter"]}} for rank in (1, 2)
            for own in [json.loads(run.read(f"{STEP}/index-0000{rank}-of-00003.json"))]}  # fmt: skip
    box = lambda component, _, shape: (
        ((2, 4), (0, 3)) if (component, shape) == ("ema", (6, 3)) else ((0, 0),) * len(shape)
    )
    needs = Needs(1, 3, box, own=sent)
    found = decode_manifest(
        run.read(f"{STEP}/manifest.json"), "m", read=lambda name, _: run.read(f"{STEP}/{name}"), needs=needs
    )
    assert found.opened == {0, 1}
    assert [found.knows_all_of(file) for file in found.files] == [True, True, False]
    lengths = [each.header_bytes for each in file_checks(whole)]
    assert [each.header_bytes for each in file_checks(found, needs)][:2] == lengths[:2] != [None, None]
    assert file_checks(found)[2].header_bytes is None
    assert sorted(row[:2] for row in stored_in(found)[1]) == sorted(row[:2] for row in stored_in(whole)[1])
    HeaderCheck(run, STEP, found).check(range(3))
    for number, file in enumerate(whole.files):
        start = run.read(f"{STEP}/{file.name}", stop=whole_length(whole, number))
        assert header_of(whole, number) == start
        assert number == 2 or header_of(found, number) == start
    for number in range(3):
        file = whole.files[number]
        data = bytearray(run.read(f"{STEP}/{file.name}"))
        data[data.index(b"bias['w']")] ^= 1
        changed = Changed(run, f"{STEP}/{file.name}", bytes(data))
        if number < 2:
            with pytest.raises(CheckpointDamaged):
                HeaderCheck(changed, STEP, found).check([number])
        else:
            HeaderCheck(changed, STEP, found).check([number])
        with pytest.raises(CheckpointDamaged):
            HeaderCheck(changed, STEP, whole).check([number])


def whole_length(manifest, number):
    return min(
        shard.start
        for each in manifest.components
        for table in each.tensors
        for record in table
        for shard in record.shards
        if shard.file == number
    )


class Changed:
    """A store of which one file is another."""

    def __init__(self, store, name, data):
        self._store, self._name, self._data = store, name, data

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, name, *, start=0, stop=None):
        return self._data[start:stop] if name == self._name else self._store.read(name, start=start, stop=stop)

"""Version 3 of the manifest: root and indexes together are the manifest, each is covered by a digest, and nothing hostile is believed."""

import json
import math

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kit.core.roots import resealed

from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointHostile, CheckpointTorn, TrainfoldError
from trainfold.core.format.file_names import index_name
from trainfold.core.format.indexes.contributions import contributions_of, fingerprint_from, fingerprint_in
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.manifest import (
    PIECE_BYTES,
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
    encode_index,
    encode_manifest,
)
from trainfold.core.format.manifest_reader import check_root, check_structures, decode_manifest
from trainfold.core.history.recognise import file_checks
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.slices import intersect, volume, whole_box
from trainfold.core.save.file_layout import stored_in

DIGEST = digest_of(b"x")


@st.composite
def manifests(draw):
    """What ranks save: whole leaves, leaves cut by rules or by lists, large ones with pieces, and what each rank has of its own."""
    mesh = make_mesh(draw(st.sampled_from([(1,), (2,), (3,), (2, 2)])))
    table, ends = [], [4096] * mesh.size

    def shard(rank, box, itemsize):
        size = volume(box) * itemsize
        start, ends[rank] = ends[rank], ends[rank] + size
        pieces = "0a" * 16 * math.ceil(size / PIECE_BYTES) if size > PIECE_BYTES else ""
        return ShardRecord(rank, start, start + size, box, DIGEST, pieces)

    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 700]), min_size=1, max_size=3)))
        kind = draw(st.sampled_from(["whole", "rows", "rule", "list"]))
        rule = make_placement(mesh, [range(len(mesh.shape))]) if kind == "rule" else None
        if kind == "whole":
            boxes = {draw(st.integers(0, mesh.size - 1)): whole_box(shape)}
        else:
            cut = make_placement(mesh, [range(len(mesh.shape))])
            boxes = {rank: cut.box(shape, mesh.coordinate_of(rank)) for rank in range(mesh.size)}
        shards = [shard(rank, box, 4) for rank, box in boxes.items() if volume(box)]
        shards.sort(key=lambda each: each.box)
        if kind == "rows":  # of a tensor that ranks hold whole
            shards = [each._replace(whole="" if index else digest_of(b"whole")) for index, each in enumerate(shards)]
        table.append(TensorRecord(f"ema[{number}]", "float32", shape, tuple(shards), rule))
    ema = ComponentRecord("ema", ({"list": [{"t": number} for number in range(len(table))]},), (tuple(table),), DIGEST)
    files = [FileRecord(f"ema-{rank}.safetensors", ("ema",), rank, ends[rank], DIGEST) for rank in range(mesh.size)]
    components = [ema]
    if mesh.size > 1 and draw(st.booleans()):
        nodes = tuple({"dict": {"n": rank}} for rank in range(mesh.size))
        components.append(ComponentRecord("rng", nodes, ((),) * mesh.size, DIGEST))
    return Manifest(Head("run", 7), mesh.size, tuple(components), ("model",), {"lr": 0.1}, {"torch": "2"}, tuple(files))


INSIDE = "inside"
APART = "apart"  # with a file for rank 0's index, as where it is large
FORMS = st.sampled_from([INSIDE, APART])


def written(manifest, form=INSIDE):
    """The manifest with its indexes, and the bytes of each of its files: name -> bytes."""
    ranks = range(form != APART, manifest.world_size)
    data = {index_name(rank, manifest.world_size): encode_index(manifest, rank) for rank in ranks}
    rows = tuple(
        IndexRecord(name, rank, len(each), digest_of(each))
        for rank, (name, each) in zip(ranks, data.items(), strict=True)
    )
    whole = attrs.evolve(manifest, indexes=rows)
    return whole, {**data, "manifest.json": encode_manifest(whole)}


def read(data):
    return decode_manifest(data["manifest.json"], "m", read=lambda name, _: data.get(name))


@settings(deadline=None)
@given(manifests(), FORMS)
def test_root_and_indexes_are_what_was_saved(manifest, form):
    """X04: a root manifest, and an index a rank; the same in all forms of a root."""
    whole, data = written(manifest, form)
    assert read(data) == whole
    check_structures(whole, "m")
    check_root(data["manifest.json"], "m")
    for rank in range(1, manifest.world_size):  # a rank knows its own shards only
        tables = [
            tuple(
                tuple(attrs.evolve(r, shards=tuple(s for s in r.shards if s.file == rank)) for r in t)
                for t in c.tensors
            )
            for c in whole.components
        ]
        alone = [attrs.evolve(c, tensors=t) for c, t in zip(whole.components, tables, strict=True)]
        assert (
            encode_index(attrs.evolve(whole, components=tuple(alone)), rank)
            == data[index_name(rank, manifest.world_size)]
        )


@settings(deadline=None)
@given(manifests(), st.data(), FORMS)
def test_a_changed_byte_of_a_root_or_an_index_is_found_and_a_missing_index_is_named(manifest, draw, form):
    _, data = written(manifest, form)
    name = draw.draw(st.sampled_from(sorted(data)))
    place = draw.draw(st.integers(0, len(data[name]) - 1))
    changed = bytearray(data[name])
    changed[place] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(TrainfoldError) as caught:
        read({**data, name: bytes(changed)})
    assert name == "manifest.json" or (isinstance(caught.value, CheckpointDamaged) and name in caught.value.where)
    if name != "manifest.json":
        with pytest.raises(CheckpointTorn, match=name):
            read({key: each for key, each in data.items() if key != name})


def needed_shards(manifest, box_of):
    """What of each shared tensor the shards that meet a box hold: file, range and box."""
    return {
        record.path: {(each.file, each.start, each.stop, each.box) for each in record.shards if intersect(each.box, box_of(record)) is not None}
        for record in manifest.component("ema").tensors[0]
    }  # fmt: skip


@settings(deadline=None)
@given(manifests(), st.data(), FORMS)
def test_the_indexes_that_a_rank_opens_hold_all_that_it_needs(manifest, data, form):
    """V12: whatever the rule, the list or the replica that wrote it; and a missing index is missed only by those who need it.

    The tables have no other shard, and the headers of files can be put together from them and the places of the others.
    """
    whole, files = written(manifest, form)
    boxes = {}
    for record in whole.component("ema").tensors[0]:
        sides = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in record.shape]
        boxes[record.path] = data.draw(st.sampled_from([None, tuple(map(tuple, sides))]))
    rank = data.draw(st.integers(0, 3))
    needs = Needs(rank, data.draw(st.sampled_from([whole.world_size, 7])), lambda _, path, __: boxes[path])
    opened = []

    def read_index(name, _):
        opened.append(name)
        return files[name]

    found = decode_manifest(files["manifest.json"], "m", read=read_index, needs=needs)
    check_structures(found, "m")

    def box_of(record):
        return whole_box(record.shape) if boxes[record.path] is None else boxes[record.path]

    assert needed_shards(found, box_of) == needed_shards(whole, box_of)
    kept = sum(len(record.shards) for record in found.component("ema").tensors[0])
    assert kept == sum(map(len, needed_shards(found, box_of).values())), "only what is needed"
    event(f"{sum(len(each.tensors) for each in found.others)} other shards")
    mine = {number for number, each in enumerate(whole.files) if found.opened is None or each.rank in found.opened}
    every = {number: sorted(rows) for number, rows in stored_in(whole).items() if number in mine}
    assert {number: sorted(rows) for number, rows in stored_in(found).items()} == every
    firsts = {each.name: each.header_bytes for each in file_checks(whole)}
    assert all(each.header_bytes == firsts[each.name] for each in file_checks(found) if each.header_bytes is not None)
    assert len(opened) == len(set(opened))
    if form == APART:
        opened.remove(index_name(0, whole.world_size))
    assert found.opened == (None if len(opened) + 1 == whole.world_size else {0, *(int(name[6:11]) for name in opened)})
    assert found.files == whole.files
    event(f"{len(opened)} of {whole.world_size - 1} indexes")
    if not any(volume(box_of(record)) for record in whole.component("ema").tensors[0]):
        assert len(opened) <= 1, "its own random streams"


def test_a_leaf_that_no_rule_cuts_is_looked_for_on_the_ranks_that_had_it():
    """X02: a stage of a pipeline writes it with its first ranks, so no other stage's index is opened, and not all of its own."""
    rule = make_placement(make_mesh((3,), ranks=[3, 4, 5]), [])
    shards = (ShardRecord(3, 4096, 4112, whole_box((4,)), DIGEST),)
    table = (TensorRecord("ema[0]", "float32", (4,), shards, rule),)
    files = tuple(FileRecord(f"ema-{rank}", ("ema",), rank, 4112, DIGEST) for rank in range(6))
    component = ComponentRecord("ema", ({"list": [{"t": 0}]},), (table,), DIGEST)
    _, data = written(Manifest(Head("run", 7), 6, (component,), (), {}, {}, files))
    needs = Needs(0, 1, lambda *_: None)
    found = decode_manifest(data["manifest.json"], "m", read=lambda name, _: data[name], needs=needs)
    assert found.opened == {0, 3}


def of_two_ranks(shape, *shards):
    """The bytes of a checkpoint of two ranks with one tensor."""
    files = tuple(FileRecord(f"ema-{rank}", ("ema",), rank, 4104, DIGEST) for rank in range(2))
    component = ComponentRecord(
        "ema", ({"list": [{"t": 0}]},), ((TensorRecord("ema[0]", "float32", shape, shards),),), DIGEST
    )
    return written(Manifest(Head("run", 7), 2, (component,), (), {}, {}, files))[1]


def test_a_rank_that_needs_the_end_of_a_shared_tensor_does_without_the_part_that_has_its_digest():
    """X02: replicas wrote it, and ranks that hold parts of it load it."""
    first = ShardRecord(0, 4096, 4104, ((0, 2),), DIGEST, "", digest_of(b"whole"))
    data = of_two_ranks((4,), first, ShardRecord(1, 4096, 4104, ((2, 4),), DIGEST, "", ""))
    needs = Needs(1, 2, lambda *_: ((2, 4),))
    found = decode_manifest(data["manifest.json"], "m", read=lambda name, _: data[name], needs=needs)
    (record,) = found.component("ema").tensors[0]
    assert [each.box for each in record.shards] == [((2, 4),)]
    assert [each.boxes for each in found.others] == [{0: ((0, 2),)}]


def test_a_shard_that_is_not_needed_is_refused_if_no_file_can_hold_it():
    """U05: the end of its bytes does not fit 64 bits."""
    shape = (2**60, 2**60)
    data = of_two_ranks(shape, ShardRecord(0, 4096, 4104, whole_box(shape), DIGEST))
    needs = Needs(0, 2, lambda *_: ((0, 0), (0, 0)))
    with pytest.raises(CheckpointHostile):
        decode_manifest(data["manifest.json"], "m", read=lambda name, _: data[name], needs=needs)


KINDS_OF_ROOTS = {
    "rows in version 3": lambda d: d["components"][0].update(tensors=[["model", "float32", [2, 3], 0]]),
    "kinds in version 2": lambda d: d.update(schema_version=2),
    "a kind that there is not": lambda d: d["components"][0]["tensors"]["of"].__setitem__(0, 1),
    "a negative kind": lambda d: d["components"][0]["tensors"]["of"].__setitem__(0, -1),
    "a kind that is true": lambda d: d["components"][0]["tensors"].update(of=[False]),
    "a tensor without a place": lambda d: d["components"][0]["tensors"]["of"].append(0),
    "a place without a tensor": lambda d: d["components"][0]["tensors"]["of"].clear(),
    "an unknown dtype": lambda d: d["components"][0]["tensors"]["kinds"][0].__setitem__(0, "object"),
    "no layout of that number": lambda d: d["components"][0]["tensors"]["kinds"][0].__setitem__(2, 1),
    "another size in the summary": lambda d: d.update(size_bytes=d["size_bytes"] + 1),
    "another component in the summary": lambda d: d.update(fingerprints={**d["fingerprints"], "ema": DIGEST}),
    "another order in the summary": lambda d: d.update(fingerprints=dict(reversed(d["fingerprints"].items()))),
    "a second fingerprint": lambda d: d["components"][0].update(fingerprint=DIGEST),
    "no summary": lambda d: d.pop("fingerprints"),
    "a field more": lambda d: d["components"][0]["tensors"].update(more=[]),
    "no index of rank 0": lambda d: d["indexes"].pop(0),
    "two indexes of rank 0": lambda d: d.update(index={"own": {"rng": {"node": {}, "tensors": []}}, "shards": {}}),
    "an index of rank 0 that is another one": lambda d: d["indexes"][0].update(digest=DIGEST),
}


@pytest.mark.parametrize("case", KINDS_OF_ROOTS)
def test_a_hostile_root_of_version_3_with_a_fitting_digest_is_refused(case):
    """U04, U05."""
    whole, data = written(small(), APART)
    assert read(data) == whole
    document = json.loads(data["manifest.json"])
    KINDS_OF_ROOTS[case](document)
    with pytest.raises((CheckpointHostile, CheckpointTorn, CheckpointDamaged)):
        check_structures(read({**data, "manifest.json": resealed(document)}), "m")


def test_shards_that_are_missing_in_all_indexes_are_named():
    """The digests fit, so an attacker, or a bug, wrote it so."""
    rule = make_placement(make_mesh((2,)), [[0]])
    shards = tuple(ShardRecord(rank, 4096, 4104, ((2 * rank, 2 * rank + 2),), DIGEST) for rank in range(1))
    table = (TensorRecord("ema[0]", "float32", (4,), shards, rule),)
    files = tuple(FileRecord(f"ema-{rank}", ("ema",), rank, 4104, DIGEST) for rank in range(2))
    component = ComponentRecord("ema", ({"list": [{"t": 0}]},), (table,), DIGEST)
    _, data = written(Manifest(Head("run", 7), 2, (component,), (), {}, {}, files))
    for low, is_there in ((0, True), (2, False)):
        needs = Needs(0, 1, lambda *_, low=low: ((low, low + 2),))
        if is_there:
            assert decode_manifest(data["manifest.json"], "m", read=lambda *_: None, needs=needs).opened == {0}
        else:
            with pytest.raises(
                CheckpointHostile, match=r"ema\[0\]: expected shards that hold \(\(2, 4\),\) once, found 0 of 2"
            ):
                decode_manifest(data["manifest.json"], "m", read=lambda name, _: data[name], needs=needs)


@settings(deadline=None, max_examples=200)
@given(manifests(), st.data(), FORMS)
def test_a_document_changed_anywhere_is_read_or_refused_by_name(manifest, draw, form):
    """U05: any value in a field of the root or an index gives a manifest or a named error, never another exception."""
    _, data = written(manifest, form)
    name = draw.draw(st.sampled_from(sorted(data)))
    changed = place = json.loads(data[name])
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = draw.draw(st.sampled_from(list(keys)))
        if isinstance(place[key], dict | list) and place[key] and draw.draw(st.booleans()):
            place = place[key]
            continue
        odd = [st.none(), st.integers(), st.text(max_size=4), st.sampled_from([[], {}, [[]], 0.5, True, 2**62])]
        place[key] = draw.draw(st.one_of(odd))
        break
    if name == "manifest.json":
        data[name] = resealed(changed)
    else:
        data[name] = json.dumps(changed).encode()
        root = json.loads(data["manifest.json"])
        (row,) = (each for each in root["indexes"] if each["name"] == name)
        row |= {"size_bytes": len(data[name]), "digest": digest_of(data[name])}
        data["manifest.json"] = resealed(root)
    low = draw.draw(st.integers(0, 3))
    part = Needs(0, 7, lambda _, __, shape: tuple((min(low, size), size) for size in shape))
    for needs in (None, part):
        try:
            found = decode_manifest(data["manifest.json"], "m", read=lambda name, _: data.get(name), needs=needs)
            check_structures(found, "m")
            stored_in(found)
        except TrainfoldError as error:
            assert error.fix  # noqa: PT017 - both outcomes are legal


def small():
    """Two ranks with halves of one tensor, and a stream each."""
    rule = make_placement(make_mesh((2,)), [[0]])
    shards = tuple(ShardRecord(rank, 4096, 4108, ((rank, rank + 1), (0, 3)), DIGEST) for rank in range(2))
    model = ComponentRecord("model", ({"t": 0},), ((TensorRecord("model", "float32", (2, 3), shards, rule),),), DIGEST)
    rng = ComponentRecord("rng", ({"dict": {}}, {"dict": {}}), ((), ()), DIGEST)
    files = tuple(FileRecord(f"model-{rank}.safetensors", ("model",), rank, 4108, DIGEST) for rank in range(2))
    return Manifest(Head("run", 7), 2, (model, rng), (), {}, {}, files)


ROOTS = {
    "a layout of more dimensions": lambda d: d["layouts"][0].__setitem__(4, [[], [], [0]]),
    "a mesh without ranks": lambda d: d["layouts"][0].__setitem__(0, [0]),
    "an axis that cuts twice": lambda d: d["layouts"][0].__setitem__(4, [[0], [0]]),
    "a rule that leaves a gap": lambda d: d["layouts"][0].__setitem__(0, [1]),
    "two files of a component and a rank": lambda d: d["files"][1].update(rank=0),
    "an index of rank 0": lambda d: d["indexes"][0].update(rank=0),
    "an index that is the manifest": lambda d: d["indexes"][0].update(name="manifest.json"),
    "an index that escapes": lambda d: d["indexes"][0].update(name="../index.json"),
    "more ranks than structures": lambda d: d.update(world_size=3),
    "fewer ranks than files": lambda d: d.update(world_size=1),
    "a file of a rank that there is not": lambda d: d["files"][0].update(rank=2),
    "own structures of too few ranks": lambda d: d["index"]["own"].pop("rng"),
    "an own structure beside a shared one": lambda d: d["index"]["own"].update(model={"node": {}, "tensors": []}),
    "shards of an unknown component": lambda d: d["index"]["shards"].update(ema=[]),
    "a part twice": lambda d: d["index"]["shards"]["model"].append(d["index"]["shards"]["model"][0]),
    "a box outside": lambda d: d["index"]["shards"]["model"][0].__setitem__(2, [[0, 5], [0, 3]]),
    "a text that no digest looks like": lambda d: d["index"]["shards"]["model"][0].__setitem__(3, DIGEST[:-1] + "g"),
    "a number for a digest": lambda d: d["index"]["shards"]["model"][0].__setitem__(3, 7),
    "a number for the digests of pieces": lambda d: d["index"]["shards"]["model"][0].__setitem__(4, 7),
    "a digest of a piece too many": lambda d: d["index"]["shards"]["model"][0].__setitem__(4, "0a" * 16),
    "a start inside the header": lambda d: d["index"]["shards"]["model"][0].__setitem__(1, 4),
    "more bytes than the file": lambda d: d["index"]["shards"]["model"][0].__setitem__(1, 4100),
    "no tensor of that number": lambda d: d["index"]["shards"]["model"][0].__setitem__(0, 1),
    "the digest of the whole tensor in one part": lambda d: d["index"]["shards"]["model"][0].append(DIGEST),
    "no digest of the whole tensor": lambda d: d["index"]["shards"]["model"][0].append(""),
    "a part with one item more": lambda d: d["index"]["shards"]["model"][0].extend([DIGEST, 1]),
    "an unknown field": lambda d: d["index"].update(more={}),
}


@pytest.mark.parametrize("case", ROOTS)
def test_a_hostile_root_with_a_fitting_digest_is_refused(case):
    """U04, U05."""
    whole, data = written(small())
    assert read(data) == whole
    document = json.loads(data["manifest.json"])
    ROOTS[case](document)
    with pytest.raises((CheckpointHostile, CheckpointTorn, CheckpointDamaged)):
        read({**data, "manifest.json": resealed(document)})


@pytest.mark.parametrize("change", [{"rank": 0}, {"format": "trainfold"}, {"own": {}}, {"more": 1}, {"shards": []}])
def test_an_index_of_another_rank_or_kind_is_refused(change):
    _, data = written(small())
    name = index_name(1, 2)
    data[name] = json.dumps({**json.loads(data[name]), **change}).encode()
    root = json.loads(data["manifest.json"])
    root["indexes"][0] |= {"size_bytes": len(data[name]), "digest": digest_of(data[name])}
    with pytest.raises(CheckpointHostile):
        read({**data, "manifest.json": resealed(root)})


@settings(deadline=None)
@given(manifests())
def test_a_fingerprint_is_put_together_from_what_each_rank_wrote(manifest):
    for component in manifest.components:
        parts = {rank: contributions_of(component, manifest, [rank])[rank] for rank in range(manifest.world_size)}
        kinds = [] if component.is_own else [str(record.spec) for record in component.tensors[0]]
        assert fingerprint_from(component.name, component.nodes[0], kinds, parts) == fingerprint_in(component, manifest)

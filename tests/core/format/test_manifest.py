"""Version 1 of the manifest, which loads for ever: decoding inverts encoding, its own digest proves it, and anything that could harm a reader is refused."""

import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core.roots import encode_v1, resealed

from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointForeign,
    CheckpointHostile,
    FutureVersion,
    TrainfoldError,
)
from trainfold.core.format.manifest import (
    END,
    TAIL,
    ComponentRecord,
    FileRecord,
    Head,
    Manifest,
    ShardRecord,
    TensorRecord,
)
from trainfold.core.format.manifest_reader import check_structures, decode_first_line, decode_manifest
from trainfold.core.format.upgrade import upgraded

DIGEST = digest_of(b"x")


def small_manifest(**changes):
    shard = ShardRecord(0, 4096, 4096 + 24, ((0, 2), (0, 3)), DIGEST)
    record = TensorRecord("model.params['w']", "float32", (2, 3), (shard,))
    component = ComponentRecord("model", ({"dict": {"w": {"t": 0}}},), ((record,),), DIGEST)
    file = FileRecord("model-00000-of-00001.safetensors", ("model",), 0, 4120, DIGEST)
    whole = Manifest(
        Head("run", 7, 1, ((0, 5),), "step-00000005", schema_version=1),
        1,
        (component,),
        ("rng",),
        {"lr": 0.1},
        {"torch": "2"},
        (file,),
    )
    return attrs.evolve(whole, **changes)


def document():
    return json.loads(encode_v1(small_manifest()))


def test_what_is_written_is_what_is_read():
    """C04: components, files, sizes, hashes, world, versions, step and run id are in the manifest and are restored."""
    whole = small_manifest()
    assert decode_manifest(encode_v1(whole), "m") == whole
    assert decode_first_line(encode_v1(whole)[:300], "m") == (whole.head, None)


def test_equal_manifests_have_equal_bytes_and_are_plain_json():
    """C10: the contents do not depend on how often or when it was saved."""
    assert encode_v1(small_manifest()) == encode_v1(small_manifest())
    assert document()["digest"].startswith("xxh3:")


def test_a_changed_byte_anywhere_is_detected():
    data = encode_v1(small_manifest())
    for index in range(len(data)):
        for flip in (0x01, 0x80):
            torn = bytearray(data)
            torn[index] ^= flip
            with pytest.raises((CheckpointDamaged, CheckpointForeign)):
                decode_manifest(bytes(torn), "m")


def test_a_truncated_manifest_is_detected_at_every_length():
    data = encode_v1(small_manifest())
    for length in range(len(data)):
        with pytest.raises((CheckpointDamaged, CheckpointForeign)):
            decode_manifest(data[:length], "m")


def test_a_future_version_is_refused_by_name():
    newer = {**document(), "schema_version": 99}
    with pytest.raises(FutureVersion, match="newer"):
        decode_manifest(resealed(newer), "m")
    with pytest.raises(FutureVersion):
        decode_first_line(resealed(newer), "m")


HOSTILE = {
    "escape by ..": lambda d: d["files"][0].update(name="../../etc/passwd"),
    "absolute name": lambda d: d["files"][0].update(name="/etc/passwd"),
    "backslash": lambda d: d["files"][0].update(name="a\\b"),
    "dot name": lambda d: d["files"][0].update(name=".lock"),
    "nul": lambda d: d["files"][0].update(name="a\x00b"),
    "empty name": lambda d: d["files"][0].update(name=""),
    "long name": lambda d: d["files"][0].update(name="a" * 300),
    "component escape": lambda d: d["components"][0].update(name="../model"),
    "run id escape": lambda d: d.update(run_id="a/b"),
    "parent escape": lambda d: d.update(parent="../step-00000001"),
    "same file twice": lambda d: d["files"].append(dict(d["files"][0])),
    "negative size": lambda d: d["files"][0].update(size_bytes=-1),
    "absurd size": lambda d: d["files"][0].update(size_bytes=2**80),
    "float step": lambda d: d.update(step=7.0),
    "bool step": lambda d: d.update(step=True),
    "range past the file": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(2, 10**6),
    "range too small": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(2, 4100),
    "range before the data": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(1, 0),
    "file index": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(0, 5),
    "negative file index": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(0, -1),
    "box outside": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(3, [[0, 2], [0, 9]]),
    "box of other rank": lambda d: d["components"][0]["tensors"][0][0]["shards"][0].__setitem__(3, [[0, 6]]),
    "huge shape": lambda d: d["components"][0]["tensors"][0][0].update(shape=[2**40, 2**40]),
    "many dimensions": lambda d: d["components"][0]["tensors"][0][0].update(shape=[1] * 1000),
    "unknown dtype": lambda d: d["components"][0]["tensors"][0][0].update(dtype="object"),
    "name in torch that is not a dtype": lambda d: d["components"][0]["tensors"][0][0].update(dtype="save"),
    "no shards": lambda d: d["components"][0]["tensors"][0][0].update(shards=[]),
    "overlapping ranges": lambda d: d["components"][0]["tensors"][0].append(
        {**d["components"][0]["tensors"][0][0], "path": "model.params['v']"}
    ),
    "unknown field": lambda d: d.update(surprise=1),
    "missing field": lambda d: d.pop("world_size"),
    "bad digest": lambda d: d["files"][0].update(digest="xxh3:zz"),
    "nodes without tables": lambda d: d["components"][0].update(tensors=[]),
    "same component twice": lambda d: d["components"].append({**d["components"][0], "tensors": [[]]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_with_a_fitting_digest_is_refused(name):
    """U04, U05: path escapes, overlapping offsets and absurd sizes are refused before any file is opened."""
    changed = document()
    HOSTILE[name](changed)
    with pytest.raises(CheckpointHostile) as caught:
        decode_manifest(resealed(changed), "runs/a/step-7/manifest.json")
    assert "manifest.json" in caught.value.where


def test_duplicate_keys_nan_and_depth_are_refused():
    """U05: duplicate JSON keys, constants outside JSON and absurd depths."""
    base = encode_v1(small_manifest())
    covered = base[: base.rfind(TAIL)]
    deep = b"[" * 100_000 + b"]" * 100_000
    for extra in (b',"step":8', b',"contract":{"a":NaN}', b',"deep":' + deep, b',"x":"\xff"'):
        text = covered + extra
        with pytest.raises(CheckpointHostile):
            decode_manifest(text + TAIL + digest_of(text).encode() + END, "m")


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_document_changed_anywhere_is_read_or_refused_by_name(data):
    """U05: any value in a field gives a manifest or a named error, never another exception."""
    changed = document()
    place = changed
    while True:
        key = (
            data.draw(st.sampled_from(sorted(place)))
            if isinstance(place, dict)
            else data.draw(st.integers(0, len(place) - 1))
        )
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(
            st.one_of(
                st.none(),
                st.integers(),
                st.text(max_size=4),
                st.just([]),
                st.just({}),
                st.just([[]]),
                st.floats(allow_nan=False),
            )
        )
        break
    try:
        decode_manifest(resealed(changed), "m")
    except TrainfoldError as error:
        assert error.fix  # noqa: PT017 - both outcomes are legal


def test_an_old_document_goes_through_every_upgrade_in_turn():
    history = {1: lambda d: {**d, "steps": [1]}, 2: lambda d: {**d, "steps": [*d["steps"], 2]}}
    assert upgraded({"schema_version": 1}, "m", current=3, upgrades=history) == {"schema_version": 1, "steps": [1, 2]}
    with pytest.raises(CheckpointHostile):
        upgraded({"schema_version": 0}, "m")


@pytest.mark.parametrize(
    "node", [{"t": 1}, {"t": -1}, {"t": 10**30}, {"t": "0"}, {"dict": {"w": {"t": 5}}}, {"eval": "1"}, {"list": 3}, [1]]
)
def test_a_structure_that_points_nowhere_is_refused(node):
    """U05: the structure is checked before anything is read or built from it."""
    changed = document()
    changed["components"][0]["nodes"] = [node]
    with pytest.raises(CheckpointHostile):
        check_structures(decode_manifest(resealed(changed), "m"), "m")

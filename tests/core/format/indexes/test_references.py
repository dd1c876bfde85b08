"""Version 4 of the manifest: references to files of other checkpoints. What could lead a reader elsewhere is refused, and everything it says is read back."""

import json

import attrs
import pytest
from kit.backends.reuse_cases import SHAPES, Chain
from kit.core.roots import resealed

from trainfold.backends.runs.scan import read_manifest, read_root
from trainfold.core.errors import CheckpointHostile
from trainfold.core.format.manifest import encode_manifest
from trainfold.core.format.manifest_reader import check_structures, decode_first_line, decode_manifest

NAME = "step-00000002"
OLD = "step-00000001"


@pytest.fixture(scope="module")
def root():
    """The root of a checkpoint of one rank that refers to another one."""
    chain = Chain()
    chain.save(1, dict.fromkeys(SHAPES, 0))
    chain.save(2, {name: int(name == "half") for name in SHAPES})
    return read_root(chain.store, NAME)


def test_what_is_written_is_what_is_read(root):
    whole = decode_manifest(root, "m")
    check_structures(whole, "m")
    assert whole.head.schema_version == 4
    assert {file.checkpoint for file in whole.references} == {OLD}
    assert encode_manifest(whole) == root
    assert decode_first_line(root, "m") == (whole.head, whole.summary)
    assert whole.summary.refers == (OLD,)
    assert whole.size_bytes == sum(file.size_bytes for file in whole.own_files)


def rows(document, component="model"):
    return document["index"]["references"][component][0]


HOSTILE = {
    "its own directory": lambda d: d["references"][0].update(checkpoint=NAME),
    "above the run": lambda d: d["references"][0].update(checkpoint=".."),
    "an absolute directory": lambda d: d["references"][0].update(checkpoint="/etc"),
    "two levels": lambda d: d["references"][0].update(checkpoint=f"{OLD}/x"),
    "no directory of a step": lambda d: d["references"][0].update(checkpoint="step-1"),
    "no directory": lambda d: d["references"][0].update(checkpoint=""),
    "a directory that is a number": lambda d: d["references"][0].update(checkpoint=7),
    "a directory that is a list": lambda d: d["references"][0].update(checkpoint=[]),
    "a directory that is an object": lambda d: d["references"][0].update(checkpoint={}),
    "above a checkpoint": lambda d: d["references"][0].update(name="../../x-00000-of-00001.safetensors"),
    "a manifest": lambda d: d["references"][0].update(name="manifest.json"),
    "an index": lambda d: d["references"][0].update(name="index-00000-of-00001.json"),
    "a file that no save writes": lambda d: d["references"][0].update(name="notes.safetensors"),
    "a rank that did not save": lambda d: d["references"][0].update(rank=3),
    "another component": lambda d: d["references"][0].update(component="optimizer"),
    "the same file twice": lambda d: d["references"].append(dict(d["references"][0])),
    "a negative size": lambda d: d["references"][0].update(size_bytes=-1),
    "a file that ends before its tensors": lambda d: d["references"][0].update(size_bytes=100),
    "a field more": lambda d: d["references"][0].update(more=1),
    "a field less": lambda d: d["references"][0].pop("digest"),
    "no table": lambda d: d.pop("references"),
    "an object": lambda d: d.update(references={}),
    "a number for a row": lambda d: d.update(references=[7]),
    "a head without the checkpoints": lambda d: d.update(refers=[]),
    "a head with others": lambda d: d.update(refers=[OLD, "step-00000009"]),
    "a head with names twice": lambda d: d.update(refers=[OLD, OLD]),
    "a head without the field": lambda d: d.pop("refers"),
    "a file that the root does not list": lambda d: rows(d).__setitem__(1, "model-00000-of-00001.r1.safetensors"),
    "a checkpoint that the root does not list": lambda d: rows(d).__setitem__(0, "step-00000009"),
    "a name that is a number": lambda d: rows(d).__setitem__(1, ["x"]),
    "a group that is a number": lambda d: d["index"]["references"].update(model=[7]),
    "groups that are a number": lambda d: d["index"]["references"].update(model=7),
    "references that are a list": lambda d: d["index"].update(references=[]),
    "a component that is not there": lambda d: d["index"]["references"].update(other=[]),
    "rows of another component": lambda d: d["index"]["references"].update(extra=d["index"]["references"].pop("model")),
    "the same bytes twice": lambda d: rows(d)[2].append(list(rows(d)[2][0])),
    "bytes before the header": lambda d: rows(d)[2][0].__setitem__(1, 0),
    "bytes after the end": lambda d: rows(d)[2][0].__setitem__(1, 2**40),
    "a part that is missing": lambda d: rows(d)[2].pop(),
    "a part that is also its own": lambda d: d["index"]["shards"].setdefault("model", []).append(list(rows(d)[2][0])),
    "references in version 3": lambda d: d.update(schema_version=3),
    "an index with references in version 3": lambda d: [d.update(schema_version=3), d.pop("references"), d.pop("refers")],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reference_with_a_fitting_digest_is_refused(root, name):
    """U04, U05: no reference leads out of the run, to another file than a rank's own, or past its end."""
    changed = json.loads(root)
    HOSTILE[name](changed)
    with pytest.raises(CheckpointHostile):
        check_structures(decode_manifest(resealed(changed), "runs/a/step-00000002/manifest.json"), "m")


def test_a_manifest_that_refers_to_others_has_no_earlier_version(root):
    whole = decode_manifest(root, "m")
    with pytest.raises(AssertionError, match="version"):
        encode_manifest(attrs.evolve(whole, head=attrs.evolve(whole.head, schema_version=3)))


def test_the_indexes_of_other_ranks_refer_too():
    chain = Chain(2, cut=True)
    chain.save(1, dict.fromkeys(SHAPES, 0))
    chain.save(2, {name: int(name == "half") for name in SHAPES})
    manifest = read_manifest(chain.store, NAME)
    assert {file.rank for file in manifest.references} == {0, 1}
    document = json.loads(chain.store.read(f"{NAME}/index-00001-of-00002.json"))
    assert document["references"]["model"][0][:2] == [OLD, "model-00001-of-00002.safetensors"]

"""A load checks a data file's header against the manifest, and accepts other writers' headers by the file's digest."""

import json
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.runs.api import load, save
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import CheckpointDamaged, CheckpointUnreadable
from trainfold.core.format.manifest import encode_manifest
from trainfold.core.format.structure.describe import describe
from trainfold.core.save.file_layout import header_of
from trainfold.core.save.save_plan import plan_save
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import strategies

ROOT = Path(__file__).parents[3]


@given(
    st.dictionaries(st.text(max_size=4), strategies.tensors(), max_size=5),
    st.dictionaries(st.text(max_size=4), strategies.tensors(), max_size=3),
)
@settings(deadline=None)
def test_the_header_that_the_manifest_implies_is_the_one_that_was_written(one, other):
    """Law: for any dtypes, empty tensors and names."""
    store = MemoryStore()
    state = TrainState(trainer=Progress(step=1), extra={"one": one, "other": other})
    save(state, store)
    manifest = read_manifest(store, "step-00000001")
    for index, file in enumerate(manifest.files):
        header = header_of(manifest, index)
        assert header is not None
        assert store.read(f"step-00000001/{file.name}", stop=len(header)) == header
    plans = plan_save(
        [{name: describe(part, name)[0] for name, part in (("one", one), ("other", other))}], step=1, revision=0
    ).files
    assert {plan.name: plan.header for plan in plans} == {
        file.name: header_of(manifest, index) for index, file in enumerate(manifest.files)
    }


def test_headers_of_checkpoints_of_every_version_are_the_ones_that_are_implied():
    """Old checkpoints: without this, each load of one would read whole files."""
    runs = sorted((ROOT / "compat").glob("v*/run"))
    assert runs
    for run in runs:
        store = LocalStore(run)
        for name in (each for each in store.list() if each.startswith("step-")):
            manifest = read_manifest(store, name)
            for index, file in enumerate(manifest.own_files):  # these come first
                header = header_of(manifest, index)
                assert header is not None
                assert store.read(f"{name}/{file.name}", stop=len(header)) == header


def saved(tmp_path):
    state = TrainState(
        trainer=Progress(step=1), extra={"w": {"a": torch.ones(5), "b": torch.ones(2)}, "v": torch.zeros(2)}
    )
    save(state, tmp_path)
    return state, next((tmp_path / "step-00000001").glob("w-*"))


def test_a_header_of_other_bytes_that_says_the_same_is_damage_where_the_files_digest_does_not_fit(tmp_path):
    """The last padding space is replaced by a tab."""
    state, file = saved(tmp_path)
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") - 1] = ord("\t")
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"w-00000.*its header.*xxh3"):
        load(tmp_path, like=state, step=1)


def test_a_header_of_other_bytes_that_cannot_be_read_to_its_end_now_is_no_damage(tmp_path, monkeypatch):
    """P07: the second read of it failed, and the checkpoint was said to have another header, which put it into quarantine."""
    state, file = saved(tmp_path)
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") - 1] = ord("\t")
    file.write_bytes(data)
    read = LocalStore.read

    def reads(store, name, *, start=0, stop=None):
        if start == 8:
            raise CheckpointUnreadable(name, expected="bytes", found="503", fix="try again")
        return read(store, name, start=start, stop=stop)

    monkeypatch.setattr(LocalStore, "read", reads)
    with pytest.raises(CheckpointUnreadable, match="503"):
        load(tmp_path, like=state, step=1)


@pytest.mark.parametrize("at", [8, 20, 100, -200, -1])
def test_a_flipped_bit_in_a_header_is_found_by_a_load(at, tmp_path):
    """C07: in a name, an offset or the padding after them."""
    state, file = saved(tmp_path)
    data = bytearray(file.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little")
    data[at if at > 0 else size + at] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"w-00000.*its header.*another"):
        load(tmp_path, like=state, step=1)
    found = load(tmp_path, like=state, step=1, components=["v", "trainer"])
    assert found.trainer.step == 1


def write_header(tmp_path, file, text):
    """Write another header of the same length into a file, with a manifest that has the digest of the new file."""
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:8] + text.ljust(size - 8) + data[size:])
    manifest = read_manifest(LocalStore(tmp_path), "step-00000001")
    files = tuple(
        attrs.evolve(each, digest=digest_of(file.read_bytes())) if each.name == file.name else each
        for each in manifest.files
    )
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(encode_manifest(attrs.evolve(manifest, files=files)))


def test_a_header_of_another_writer_is_read_where_the_files_digest_fits(tmp_path):
    """The format is open: another key order and other spaces are not damage."""
    state, file = saved(tmp_path)
    data = file.read_bytes()
    document = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    reordered = {key: document[key] for key in reversed(document)}
    write_header(tmp_path, file, json.dumps(reordered, separators=(", ", ": ")).encode())
    assert load(tmp_path, like=state).extra["w"]["a"].tolist() == [1.0] * 5


HOSTILE = {
    "overlapping offsets": b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},"b":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}',
    "duplicate keys": b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}',
    "an unknown dtype": b'{"a":{"dtype":"PICKLE","shape":[5],"data_offsets":[0,20]}}',
    "an absurd shape": b'{"a":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,20]}}',
    "a further field": b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20],"file":"/etc/passwd"}}',
    "depth": b"[" * 2_000,
    "deep objects": b'{"a":' * 700,
    "no object": b"[]",
    "no JSON": b"\x80\x04pickle",
    "NaN": b'{"a": NaN}',
    "long digits": b'{"a": ' + b"9" * 2_000 + b"}",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_header_is_refused_even_if_the_files_digest_fits(name, tmp_path):
    """U05: corrupt or hostile headers fail cleanly."""
    state, file = saved(tmp_path)
    write_header(tmp_path, file, HOSTILE[name])
    with pytest.raises(CheckpointDamaged, match=r"w-00000.*its header.*another"):
        load(tmp_path, like=state, step=1)

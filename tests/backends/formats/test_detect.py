"""The format of a path: from names and first bytes, with the evidence, and without opening what it does not need."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint import save as dcp_save

import trainfold
from trainfold.backends.formats import detect
from trainfold.backends.formats.detect import detect_format
from trainfold.core.weights.detected import FORMATS, HEAD_BYTES, NameSeen, detected_file, detected_of
from trainfold.errors import CheckpointForeign, CheckpointHostile, CheckpointMissing

WEIGHTS = {"w": torch.arange(4.0)}
INDEX = "model.safetensors.index.json"


def a_run(path: Path) -> Path:
    trainfold.save(trainfold.attach(torch.nn.Linear(2, 1)).capture(), path)
    return path


def a_hub_directory(path: Path) -> Path:
    path.mkdir()
    save_file(WEIGHTS, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that there is one process
def test_each_format_is_recognised_with_what_shows_it(tmp_path):
    """V15: the format comes from what is on disk."""
    run = a_run(tmp_path / "run")
    hub = a_hub_directory(tmp_path / "hub")
    dcp_save(dict(WEIGHTS), checkpoint_id=str(tmp_path / "dcp"))
    torch.save(WEIGHTS, tmp_path / "new.pt")
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.5", "state_dict": WEIGHTS}, tmp_path / "lightning.ckpt")
    accelerate = a_hub_directory(tmp_path / "accelerate")
    (accelerate / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    found = {
        each.name: detect_format(each)
        for each in (run, run / "step-00000000", run / "latest", hub, hub / "model.safetensors", accelerate,
                     *(tmp_path / name for name in ("dcp", "new.pt", "old.pt", "lightning.ckpt")))
    }  # fmt: skip
    assert {name: each.format for name, each in found.items()} == {
        "run": "run", "step-00000000": "checkpoint", "latest": "checkpoint", "hub": "hf", "model.safetensors": "safetensors",
        "accelerate": "accelerate", "dcp": "dcp", "new.pt": "torch", "old.pt": "torch", "lightning.ckpt": "torch",
    }  # fmt: skip
    assert found["hub"].seen == ("model.safetensors", "config.json")
    assert "of Lightning, by its keys" in found["lightning.ckpt"].seen
    assert str(found["dcp"]).endswith("\n  .metadata, __0_0.distcp")


FILE_SETS = {
    "run": [NameSeen("run.json", "file", b'{"format":"trainfold-run","version":1,"run_id":"a"}'), NameSeen("latest", "directory")],
    "checkpoint": [NameSeen("manifest.json", "file", b'{"format":"trainfold","schema_version":4,'),
                   NameSeen("model-00000-of-00001.safetensors", "file"), NameSeen("optimizer-00000-of-00001.r2.safetensors", "file")],
    "hf": [NameSeen(INDEX, "file"), NameSeen("model-00001-of-00002.safetensors", "link"), NameSeen("model-00002-of-00002.safetensors", "link")],
    "dcp": [NameSeen(".metadata", "file"), NameSeen("__0_0.distcp", "file")],
}  # fmt: skip
NOISE = [
    NameSeen("README.md", "file"),
    NameSeen("config.json", "file"),
    NameSeen("export", "directory"),
    NameSeen("pytorch_model.bin", "file"),
    NameSeen("pipe", "other"),
]


@given(
    chosen=st.sets(st.sampled_from(sorted(FILE_SETS))),
    noise=st.lists(st.sampled_from(NOISE), unique=True),
    order=st.randoms(),
)
def test_a_directory_shows_the_formats_whose_files_it_has(chosen, noise, order):
    """Whatever is beside them, and in whatever order; two formats are ambiguous, and a request decides (V15)."""
    entries = [entry for name in chosen for entry in FILE_SETS[name]] + noise
    order.shuffle(entries)
    found = detected_of("a", entries)
    assert set(found.formats) == chosen
    assert found.format == ("unknown" if not chosen else "ambiguous" if len(chosen) > 1 else next(iter(chosen)))
    assert found.seen
    for asked in FORMATS:
        if asked in chosen:
            assert found.agreed(asked) == asked
        else:
            with pytest.raises(CheckpointForeign, match=f"expected the format {asked}"):
                found.agreed(asked)
    if len(chosen) != 1:
        with pytest.raises(CheckpointForeign, match=r"seen: \w|seen: \."):
            found.agreed()


@given(names=st.sets(st.sampled_from([f"model-{a:05d}-of-{b:05d}.safetensors" for b in (2, 3) for a in range(4)])))
def test_files_of_several_without_an_index_are_a_directory_of_a_hub_only_if_none_is_missing(names):
    """A save that did not finish has such files too, numbered from 0: its optimizer is not the weights of a model."""
    whole = [{f"model-{a:05d}-of-{b:05d}.safetensors" for a in range(1, b + 1)} for b in (2, 3)]
    assert (detected_of("a", [NameSeen(name, "file") for name in names]).format == "hf") == (names in whole)


def test_parts_of_ranks_in_safetensors_files_are_not_taken_for_whole_tensors(tmp_path):
    """A reader of whole tensors would find one of them, and another one for each rank."""
    names = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    for rank, name in enumerate(names):
        save_file({"w": WEIGHTS["w"] + rank}, tmp_path / name)
    assert detect_format(tmp_path).format == "dcp"
    with pytest.raises(CheckpointForeign, match="DcpDirectory"):
        trainfold.weights.HubDirectory(tmp_path).specs()


@pytest.mark.parametrize(
    ("entries", "seen", "fix"),
    [
        ([NameSeen("run.json", "link", b"")], "run.json, a link, which is never followed", "name another path"),
        ([NameSeen("manifest.json", "file", b'{"manifest_version":3}')], "manifest.json, which trainfold did not write", "name another path"),
        ([NameSeen(".metadata", "file")], ".metadata without a .distcp file: the copy is not whole", "name another path"),
        ([NameSeen("__0_0.distcp", "file"), NameSeen("__0.metadata", "file")], "__0.metadata: what each rank has saved for itself, without a .metadata of all: load it with torch on as many ranks, and save it with use_collectives=True", "name another path"),
        ([NameSeen("__0_0.distcp", "file")], "__0_0.distcp without .metadata: the save did not finish", "name another path"),
        ([NameSeen("optimizer-00000-of-00001.safetensors", "file")], f"optimizer-00000-of-00001.safetensors: files of several, without {INDEX}", "name another path"),
        ([NameSeen("pytorch_model.bin", "file")], "pytorch_model.bin: files of pickles", "name the file itself, such as pytorch_model.bin"),
        ([NameSeen("step-1000", "directory"), NameSeen("step-2000", "directory")], "the directories step-1000, step-2000", "name the one that is meant, such as step-1000"),
        ([], "an empty directory", "name another path"),
        ([NameSeen(f"{n}.txt", "file") for n in range(6)], "0.txt, 1.txt, 2.txt, 3.txt and 2 more", "name another path"),
    ],
)  # fmt: skip
def test_what_is_unknown_says_what_was_seen_and_what_to_do(entries, seen, fix):
    found = detected_of("a", entries)
    assert (found.format, found.seen, found.fix) == ("unknown", (seen,), fix)
    with pytest.raises(CheckpointForeign) as refused:
        found.agreed("native")
    assert seen in str(refused.value)
    assert refused.value.fix == fix


def test_an_export_within_a_step_directory_leaves_it_a_checkpoint_and_one_beside_its_files_is_ambiguous(tmp_path):
    """V15."""
    step = a_run(tmp_path / "run") / "step-00000000"
    a_hub_directory(step / "hf")
    assert detect_format(step).format == "checkpoint"
    save_file(WEIGHTS, step / "model.safetensors")
    found = detect_format(step)
    assert found.formats == ("checkpoint", "hf")
    assert found.agreed("native") == "checkpoint"
    with pytest.raises(CheckpointForeign, match="name the format that it has"):
        found.agreed()


@given(data=st.binary(max_size=64), size=st.integers(0, 2**62))
def test_any_bytes_are_answered(data, size):
    """U05: no byte of a file makes it fail, and what it says can be printed."""
    found = detected_file("a", data, max(size, len(data)))
    assert found.format in (*FORMATS, "unknown")
    assert str(found).count("\n") == len(found.seen)
    assert found.formats or found.fix


def test_a_safetensors_file_is_one_whatever_the_length_of_its_header():
    """V15: the length is what a file begins with, and 128 is how a pickle begins."""
    for length in (*range(8, 1024, 8), int.from_bytes(b"PK\x03\x04", "little")):
        assert detected_file("a", struct.pack("<Q", length) + b'{"', 8 + length).format == "safetensors", length


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (struct.pack("<Q", 2**40) + b"{}", "a file of 10 bytes that begins with"),  # a length beyond the file
        (struct.pack("<Q", 2) + b"[]", "a file of 10 bytes that begins with"),
        (pickle.dumps({"a": 1}), "a pickle that torch.save did not write: it is not read"),
        (b"PK\x03\x04" + b"\0" * 22 + b"\x0b\0\0\0a/data/0.pk", "a zip that begins with a/data/0.pk"),
        (b"", "an empty file"),
        (b"\x1b[2J", "a file of 4 bytes that begins with b'\\x1b[2J'"),
    ],
)
def test_a_file_that_is_none_of_them_says_what_it_begins_with(tmp_path, data, seen):
    (tmp_path / "a").write_bytes(data)
    found = detect_format(tmp_path / "a")
    assert found.format == "unknown"
    assert found.seen[0].startswith(seen)


def test_what_is_no_file_is_not_opened_and_large_files_are_not_read_whole(tmp_path, monkeypatch):
    """U05: a pipe would wait for ever, a sparse file of a terabyte has no room, and a link may lead anywhere."""
    monkeypatch.setattr(detect, "_head", None)  # nothing below may open a file
    os.mkfifo(tmp_path / "pipe")
    assert detect_format(tmp_path / "pipe").seen == ("neither a file nor a directory: it is not opened",)
    os.mkfifo(tmp_path / "run.json")
    (tmp_path / "manifest.json").symlink_to("/dev/zero")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert detect_format(tmp_path).seen == (
        "run.json, which trainfold did not write",
        "manifest.json, which trainfold did not write",
    )
    monkeypatch.undo()
    with (tmp_path / "large").open("wb") as large:
        large.write(struct.pack("<Q", 100) + b"{")
        large.truncate(2**40)
    read: list[int] = []
    monkeypatch.setattr(os, "read", lambda file, size, real=os.read: read.append(size) or real(file, size))
    assert detect_format(tmp_path / "large").format == "safetensors"
    assert read == [HEAD_BYTES]


@pytest.mark.parametrize("path", ["missing", "a\0b", "x" * 300])
def test_a_path_that_cannot_be_read_is_named(tmp_path, path):
    with pytest.raises(CheckpointMissing, match="correct the path"):
        detect_format(tmp_path / path)


def test_a_directory_with_too_many_entries_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(detect, "_ENTRIES", 3)
    for number in range(4):
        (tmp_path / f"{number}").touch()
    with pytest.raises(CheckpointHostile, match="at most 3 entries"):
        detect_format(tmp_path)


def test_what_a_file_is_called_cannot_act_on_a_terminal(tmp_path):
    (tmp_path / "a\x1b[2J\n.distcp").touch()
    assert "\x1b" not in str(detect_format(tmp_path))
    assert json.dumps(detect_format(tmp_path).seen)

"""What the directory of a checkpoint must hold before its commit, and what may go after it: decided from names and sizes."""

from hypothesis import given
from hypothesis import strategies as st

from trainfold.core.format.file_names import MANIFEST
from trainfold.core.format.manifest import FileRecord, Head, IndexRecord, Manifest
from trainfold.core.save.written import incomplete_file, stale_files

NAMES = st.sampled_from([MANIFEST, "a.safetensors", "a.r1.safetensors", "b.safetensors", "sidecar"])


@given(named=st.sets(NAMES), present=st.sets(NAMES))
def test_only_what_no_manifest_names_is_stale_and_never_the_manifest(named, present):
    files = tuple(FileRecord(name, ("a",), 0, 8, "xxh3:") for name in sorted(named - {MANIFEST}))
    manifest = Manifest(Head("r", 7), 1, (), (), {}, {}, files)
    assert set(stale_files(manifest, sorted(present))) == present - named - {MANIFEST}


def test_a_file_that_is_not_there_in_its_size_stops_the_commit_and_is_named():
    """Ranks that write to different filesystems are the usual cause."""
    records = [
        FileRecord("ema-00001-of-00002.safetensors", ("ema",), 1, 8, "xxh3:"),
        IndexRecord("index-00001-of-00002.json", 1, 9, "xxh3:"),
    ]
    sizes = {file.path("step-00000003"): file.size_bytes for file in records}
    assert incomplete_file(records, "runs/a", "step-00000003", sizes) is None
    for name, size in sizes.items():
        assert "no file" in str(incomplete_file(records, "runs/a", "step-00000003", {**sizes, name: None}))
        error = incomplete_file(records, "runs/a", "step-00000003", {**sizes, name: size + 1})
        assert name in error.where

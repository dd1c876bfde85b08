"""Large files are written on where a process was killed, and only there."""

import json
import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.convert import continued_files
from trainfold.backends.convert.continued_files import ContinuedWrites
from trainfold.errors import CheckpointHostile, SaveFailed

NAME = "step-00000001/model"


class Killed(Exception):
    """What stands for a SIGKILL: what is in the page cache stays."""


def parts_of(data, size, *, until=None):
    for start in range(0, len(data), size):
        if until is not None and start >= until:
            raise Killed
        yield data[start : start + size]


@pytest.fixture
def small_notes(monkeypatch):
    monkeypatch.setattr(continued_files, "NOTE_BYTES", 16)


@settings(max_examples=40)
@given(
    data=st.binary(min_size=1, max_size=200), size=st.integers(1, 40), stops=st.lists(st.integers(0, 200), max_size=4)
)
def test_a_file_is_the_same_however_often_its_writer_was_killed(tmp_path_factory, data, size, stops):
    """Law: what was noted is a beginning of the file, it never shrinks, and the result is what one process writes."""
    root = tmp_path_factory.mktemp("run")
    before, continued_files.NOTE_BYTES = continued_files.NOTE_BYTES, 16
    try:
        known = 0
        for until in sorted(stops):
            with ContinuedWrites(str(root), "plan") as writes:
                kept = writes.kept(NAME)
                assert kept.size_bytes >= known
                assert kept.read(0, kept.size_bytes) == data[: kept.size_bytes]
                known = kept.size_bytes
                with suppress(Killed):  # or it has written all, and was killed before it gave the file its name
                    writes.write(NAME, parts_of(data, size, until=until), size_bytes=len(data))
            assert not (root / NAME).exists()
        with ContinuedWrites(str(root), "plan") as writes:
            writes.write(NAME, parts_of(data, size), size_bytes=len(data))
            assert not (root / NAME).exists()
            writes.finish()
        assert (root / NAME).read_bytes() == data
    finally:
        continued_files.NOTE_BYTES = before


def begun(root, data=bytes(range(100)), until=50):
    with ContinuedWrites(str(root), "plan") as writes, pytest.raises(Killed):
        writes.write(NAME, parts_of(data, 10, until=until), size_bytes=len(data))
    return root / "step-00000001" / ".model.partial", root / "step-00000001" / ".model.record"


def kept_bytes(root, plan="plan"):
    with ContinuedWrites(str(root), plan) as writes:
        return writes.kept(NAME).size_bytes


@pytest.mark.usefixtures("small_notes")
def test_what_is_kept_was_noted_and_has_its_digest(tmp_path):
    """Bytes that a crash has lost, or that a program has changed, and those of another plan, are not gone on with."""
    partial, record = begun(tmp_path)
    assert kept_bytes(tmp_path) == 40  # 50 were written, and noted every 16 or more
    assert kept_bytes(tmp_path, plan="another") == 0
    whole = partial.read_bytes()
    partial.write_bytes(whole[:39])
    assert kept_bytes(tmp_path) == 0
    partial.write_bytes(b"x" + whole[1:])
    assert kept_bytes(tmp_path) == 0
    partial.write_bytes(whole)
    assert kept_bytes(tmp_path) == 40
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:-1]) + lines[-1][:-3])  # torn: the note before it counts
    assert kept_bytes(tmp_path) == json.loads(lines[-2]).get("until", 0) == 20
    record.write_bytes(b'{"plan": "plan"}\n{"until": "many"}\n')
    assert kept_bytes(tmp_path) == 0
    record.unlink()
    assert kept_bytes(tmp_path) == 0


@pytest.mark.usefixtures("small_notes")
def test_a_file_that_has_its_name_without_a_commit_is_gone_on_with(tmp_path):
    """The process was killed between the renames of several files and the commit of all."""
    data = bytes(range(100))
    with ContinuedWrites(str(tmp_path), "plan") as writes:
        writes.write(NAME, [data], size_bytes=100)
        writes.finish()
    assert kept_bytes(tmp_path) == 100
    with ContinuedWrites(str(tmp_path), "plan") as writes:
        writes.write(NAME, [data], size_bytes=100)
        writes.finish()
        writes.forget([NAME])
    assert (tmp_path / NAME).read_bytes() == data
    assert [each.name for each in (tmp_path / "step-00000001").iterdir()] == ["model"]


@pytest.mark.usefixtures("small_notes")
def test_links_are_not_followed(tmp_path):
    """U05: a link in place of the file, or of its record, is refused or does not count; nothing is written through it."""
    target = tmp_path / "elsewhere"
    target.write_bytes(b"precious")
    partial, record = begun(tmp_path)
    record.unlink()
    record.symlink_to(target)
    with pytest.raises(SaveFailed):
        kept_bytes(tmp_path)
    record.unlink()
    partial.unlink()
    partial.symlink_to(target)
    with ContinuedWrites(str(tmp_path), "plan") as writes, pytest.raises(SaveFailed):
        writes.write(NAME, [b"x"], size_bytes=1)
    partial.unlink()
    os.mkfifo(partial)
    with ContinuedWrites(str(tmp_path), "plan") as writes, pytest.raises((SaveFailed, CheckpointHostile)):
        writes.write(NAME, [b"x"], size_bytes=1)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("size", [5, 7])
def test_another_size_than_planned_is_refused(tmp_path, size):
    with ContinuedWrites(str(tmp_path), "plan") as writes, pytest.raises(SaveFailed, match="6"):
        writes.write(NAME, [b"x" * size], size_bytes=6)

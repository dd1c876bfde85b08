"""What a staged directory keeps, refuses and leaves alone; tests/crash/faults/test_staged_directories.py kills its writer."""

import json
import os
import weakref
from contextlib import nullcontext, suppress
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.backends.formats import staged_directory as staging
from trainfold.backends.formats.file_sections import bytes_from
from trainfold.backends.formats.staged_directory import staged_directory
from trainfold.core.errors import CheckpointHostile, InvalidArgument, NoSpace, RunLocked, SaveFailed


def names_in(path):
    return sorted(each.name for each in path.iterdir())


class Stopped(Exception):
    pass


def stopped_after(path, files, *, plan="a"):
    """Write some files, and stop before the commit."""
    with suppress(Stopped), staged_directory(path, plan=plan) as staged:
        for name, data in files.items():
            staged.write(name, [data], size_bytes=len(data))
        raise Stopped


def finish(path, files, *, plan="a", given=lambda data: [data]):
    """Write the files that are missing, and commit; return the names of those."""
    with staged_directory(path, plan=plan) as staged:
        written = [name for name, data in files.items() if staged.write(name, given(data), size_bytes=len(data))]
        staged.commit()
    assert {each.name: each.read_bytes() for each in path.iterdir()} == files
    assert names_in(path.parent) == [path.name]
    return written


def test_finished_files_are_kept_for_the_same_plan_and_for_no_other(tmp_path):
    files = {"a": b"1", "b": b"2" * 9}
    for plan, written in (("a", ["b"]), ("other", ["a", "b"])):
        path = tmp_path / plan / "model"
        stopped_after(path, {"a": b"1"})
        assert not path.exists()
        assert finish(path, files, plan=plan) == written


def test_a_kept_file_is_not_asked_for_its_parts(tmp_path):
    stopped_after(tmp_path / "model", {"a": b"1"})
    with staged_directory(tmp_path / "model", plan="a") as staged:
        assert staged.has("a", size_bytes=1)
        assert not staged.has("b", size_bytes=1)
        assert not staged.write("a", iter([None]), size_bytes=1)
        staged.commit()


@pytest.mark.parametrize("given", [lambda data: [data], lambda data: lambda start: [data[start:]]])
@pytest.mark.parametrize(
    "change", ["bytes", "longer", "gone", "link", "second_name", "directory", "other_size", "less"]
)
def test_a_finished_file_that_is_not_as_it_was_is_written_again(tmp_path, change, given):
    path, file, outside = tmp_path / "model", tmp_path / ".model.partial/files/a", tmp_path.parent / f"outside-{change}"
    stopped_after(path, {"a": b"123"})
    outside.write_bytes(b"123")
    if change == "bytes":
        file.write_bytes(b"124")
    elif change == "longer":
        file.write_bytes(b"1234")
    elif change == "second_name":
        os.link(file, outside.with_name(f"second-name-{tmp_path.name}"))
    elif change not in ("other_size", "less"):
        file.unlink()
        if change == "link":
            file.symlink_to(outside)
        if change == "directory":
            file.mkdir()
            (file / "b").touch()
    data = {"other_size": b"1234", "less": b"12"}.get(change, b"123")
    assert finish(path, {"a": data}, given=given) == ["a"]
    assert outside.read_bytes() == b"123"


def test_files_that_no_record_has_are_removed_and_no_link_is_followed(tmp_path):
    path, files = tmp_path / "model", tmp_path / ".model.partial/files"
    stopped_after(path, {"a": b"1"})
    outside = tmp_path.parent / "kept"
    outside.mkdir()
    (outside / "x").touch()
    (files / "link").symlink_to(outside)
    (files / "b").mkdir()
    (files / "b/link").symlink_to(outside)
    assert finish(path, {"a": b"1"}) == []
    assert (outside / "x").exists()


@pytest.mark.parametrize("record", [b"", b"{", b'{"plan": "a"', b"\xff\n", b'{"plan": "a"}\n{"name": "a", "size_bytes": -5, "digest": "", "is_whole": false}\n', b'{"plan": "a"}\n{"name": "../a", "size_bytes": 1, "digest": ""}\n',
                                    b'{"plan": "a"}\n{"name": "a", "size_bytes": 1, "digest": "xxh3:0"}\n'])  # fmt: skip
def test_a_record_of_something_else_keeps_nothing(tmp_path, record):
    stopped_after(tmp_path / "model", {"a": b"1"})
    (tmp_path / ".model.partial/record").write_bytes(record)
    assert finish(tmp_path / "model", {"a": b"1"}) == ["a"]


@pytest.mark.parametrize("kind", ["file", "full", "link"])
def test_what_is_there_is_refused_and_stays(tmp_path, kind):
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("x")
    elif kind == "full":
        path.mkdir()
        (path / "x").touch()
    else:
        path.symlink_to(tmp_path / "nowhere" / "further")
    before = names_in(tmp_path)
    if kind == "link":
        finish_at = tmp_path / "nowhere/further"
        with staged_directory(path, plan="a") as staged:
            staged.write("a", [b"1"], size_bytes=1)
            staged.commit()
        assert (finish_at / "a").read_bytes() == b"1"
        return
    with pytest.raises(InvalidArgument, match="expected a directory that does not exist yet, or is empty"), \
         staged_directory(path, plan="a", files={"x": 1}):  # fmt: skip
        pass
    assert names_in(tmp_path) == before


def test_an_empty_directory_is_taken_and_what_comes_meanwhile_is_not_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    with staged_directory(tmp_path / "empty", plan="a") as staged:
        staged.write("a", [b"1"], size_bytes=1)
        (tmp_path / "empty/x").touch()
        with pytest.raises(InvalidArgument, match="with x in it"):
            staged.commit()
        (tmp_path / "empty/x").unlink()
        staged.commit()
    assert names_in(tmp_path / "empty") == ["a"]


SMALL = st.dictionaries(st.sampled_from("abc"), st.binary(max_size=6), min_size=1)


@settings(max_examples=60)
@given(there=SMALL, other=st.none() | st.tuples(st.integers(0, 17), st.integers(0, 255)) | SMALL, size=st.integers(1, 4), by_offset=st.booleans())  # fmt: skip
@example(there={"a": b"123", "b": b""}, other=(2, 7), size=2, by_offset=True)
def test_a_directory_is_left_as_it_is_if_it_has_the_very_files_and_another_one_is_refused(tmp_path_factory, there, other, size, by_offset):  # fmt: skip
    """Law: a call that is made again, after a kill or an exit, finds its own work by the bytes of it, and nothing is ever overwritten."""
    path = tmp_path_factory.mktemp("top") / "model"
    path.mkdir()
    files = other if isinstance(other, dict) else dict(there)
    if isinstance(other, tuple):  # one byte of one of the files
        name = max(there, key=lambda name: len(there[name]))
        changed = bytearray(there[name])
        changed[other[0] % 6 : other[0] % 6 + 1] = [other[1]] if other[0] % 6 < len(changed) else []
        files[name] = bytes(changed)
    for name, data in there.items():
        (path / name).write_bytes(data)
    sizes = {name: len(data) for name, data in files.items()}

    def given(data):
        return (
            (lambda start: (data[at : at + size] for at in range(start, len(data), size)))
            if by_offset
            else iter([data])
        )

    with (
        nullcontext() if there == files else pytest.raises(InvalidArgument, match=r"the very files"),
        staged_directory(path, plan="of any", files=sizes) as staged,
    ):
        written = [staged.write(name, given(data), size_bytes=len(data)) for name, data in files.items()]
        staged.commit()
        assert not any(written)
        assert staged.path_of("a") == f"{path}/a"
    assert {each.name: each.read_bytes() for each in path.iterdir()} == there
    assert names_in(path.parent) == ["model"]


@pytest.mark.parametrize("change", ["link", "directory", "more", "fewer parts", "unwritten", "record"])
def test_what_is_compared_is_plain_files_and_all_of_them(tmp_path, change):
    path = tmp_path / "model"
    finish(path, {"a": b"12", "b": b"3"})
    if change in ("link", "directory"):
        (path / "a").rename(tmp_path / "elsewhere")
        (path / "a").symlink_to(tmp_path / "elsewhere") if change == "link" else (path / "a").mkdir()
    if change == "record":  # as after a kill between the rename and the removal of what was staged
        (tmp_path / ".model.partial").mkdir()
        (tmp_path / ".model.partial/record").write_text('{"plan": "a"}')
    with (
        nullcontext() if change == "record" else pytest.raises(InvalidArgument, match="nothing is overwritten"),
        staged_directory(path, plan="a", files={"a": 2, "b": 1}) as staged,
    ):
        staged.write("a", [b"12", b"3"] if change == "more" else [b"1"] if change == "fewer parts" else [b"12"], size_bytes=2)  # fmt: skip
        if change == "more":
            (path / "c").touch()
        if change != "unwritten":
            staged.write("b", [b"3"], size_bytes=1)
        staged.commit()
    assert "model" in names_in(tmp_path)
    assert ".model.partial" not in names_in(tmp_path)


def test_two_writers_of_one_directory_are_refused_and_the_first_goes_on(tmp_path):
    path = tmp_path / "model"
    with staged_directory(path, plan="a") as staged:
        with pytest.raises(RunLocked, match="goes on where it stopped"), staged_directory(path, plan="a"):
            pass
        staged.write("a", [b"1"], size_bytes=1)
        staged.commit()
    assert names_in(tmp_path) == ["model"]


def test_staged_files_of_somewhere_else_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".model.partial").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(CheckpointHostile, match="a directory of this user"),
        staged_directory(tmp_path / "model", plan="a"),
    ):
        pass
    assert names_in(tmp_path / "elsewhere") == []


def test_a_commit_has_the_files_that_were_written_and_no_others(tmp_path):
    with staged_directory(tmp_path / "model", plan="a") as staged:
        staged.write("a", [b"1"], size_bytes=1)
        (tmp_path / ".model.partial/files/b").touch()
        with pytest.raises(CheckpointHostile, match="b"):
            staged.commit()
    assert not (tmp_path / "model").exists()


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(NoSpace), staged_directory(tmp_path / "model", plan="a", files={"a": 1 << 60}):
        pass
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"12", b"1234"])
def test_a_file_of_another_size_than_planned_is_refused(tmp_path, data):
    with staged_directory(tmp_path / "model", plan="a") as staged:
        with pytest.raises(SaveFailed, match="parts of 3 bytes in all"):
            staged.write("a", [data], size_bytes=3)
        assert not staged.has("a", size_bytes=3)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\n"])
def test_names_stay_in_the_directory(tmp_path, name):
    with staged_directory(tmp_path / "model", plan="a") as staged, pytest.raises(CheckpointHostile):
        staged.write(name, [b"1"], size_bytes=1)


# --- inside of a file ------------------------------------------------------------------------------------------------


def begun(path, data, *, until, size=10, name="a"):
    """Write a file in parts from where it ends, and stop when so many bytes of it were asked for; return the offset of the first part."""
    starts = []

    def parts_from(start):
        starts.append(start)
        for at in range(start, len(data), size):
            if until is not None and at >= until:
                raise Stopped
            yield data[at : at + size]

    with suppress(Stopped), staged_directory(path, plan="a") as staged:
        staged.write(name, parts_from, size_bytes=len(data))
        if until is not None:
            raise Stopped
        staged.commit()
    return starts[0] if starts else None


@pytest.fixture
def small_notes():
    with mock.patch.object(staging, "NOTE_BYTES", 16):
        yield


@settings(max_examples=30)
@given(data=st.binary(max_size=200), size=st.integers(1, 40), stops=st.lists(st.integers(0, 220), max_size=4))
def test_a_file_is_the_same_however_often_its_writer_was_stopped(tmp_path_factory, data, size, stops):
    """Law: it is gone on with where at most a note was missing, never before where it was, and is what one process writes."""
    path = tmp_path_factory.mktemp("top") / "model"
    with mock.patch.object(staging, "NOTE_BYTES", 16):
        known = 0
        for until in stops:
            start = begun(path, data, until=until, size=size)
            assert not path.exists()
            if start is None:  # it was finished before
                known = len(data)
            else:
                assert start >= known
                # parts that were asked for, but for the last note and a part
                known = max(known, start, min(until, len(data)) // 16 * 16 - 16 if until > start else 0)
        begun(path, data, until=None, size=size)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == {"a": data}
    assert names_in(path.parent) == ["model"]


@pytest.mark.usefixtures("small_notes")
@pytest.mark.parametrize(
    "change", ["none", "beginning", "end", "shorter", "longer", "gone", "link", "second_name", "fifo", "other_plan"]
)
def test_a_file_is_gone_on_with_only_if_its_bytes_are_as_they_were_noted(tmp_path, change):
    data, path = bytes(range(100)), tmp_path / "model"
    begun(path, data, until=60)  # noted at 16, 32 and 48
    file, outside = tmp_path / ".model.partial/files/a", tmp_path / "outside"
    there = file.read_bytes()
    outside.write_bytes(data)
    if change in ("beginning", "end", "shorter", "longer"):
        wrong = {"beginning": b"x" + there[1:], "end": there[:47] + b"x", "shorter": there[:47], "longer": there + b"more"}  # fmt: skip
        file.write_bytes(wrong[change])
    elif change == "second_name":
        os.link(file, outside.with_name("second"))
    elif change in ("gone", "link", "fifo"):
        file.unlink()
        if change == "link":
            file.symlink_to(outside)
        if change == "fifo":
            os.mkfifo(file)
    elif change == "other_plan":
        record = tmp_path / ".model.partial/record"
        record.write_text(record.read_text().replace('"plan": "a"', '"plan": "b"'))
    assert begun(path, data, until=None) == (48 if change in ("none", "longer") else 0)
    assert (path / "a").read_bytes() == outside.read_bytes() == data
    if change == "second_name":
        assert outside.with_name("second").read_bytes() == there


@pytest.mark.usefixtures("small_notes")
def test_a_note_that_was_torn_does_not_count(tmp_path):
    data, path = bytes(range(100)), tmp_path / "model"
    begun(path, data, until=60)
    record = tmp_path / ".model.partial/record"
    record.write_bytes(record.read_bytes()[:-3])
    assert begun(path, data, until=None) == 32
    assert (path / "a").read_bytes() == data


@pytest.mark.usefixtures("small_notes")
def test_what_is_gone_on_with_needs_only_the_rest_of_the_room(tmp_path):
    """A disk on which the rest fits, and not all of it again."""
    begun(tmp_path / "model", bytes(100), until=60)
    (tmp_path / ".model.partial/files/of-no-record").write_bytes(bytes(5000))
    real = os.statvfs

    def little(fd):
        found = real(fd)
        return mock.Mock(f_bavail=52 - 1 + (not (tmp_path / ".model.partial/files/of-no-record").exists()), f_frsize=1, f_bsize=found.f_bsize)  # fmt: skip

    with mock.patch.object(os, "statvfs", little), staged_directory(tmp_path / "model", plan="a", files={"a": 100}) as staged:  # fmt: skip
        staged.write("a", lambda start: [bytes(100 - start)], size_bytes=100)
        staged.commit()
    assert (tmp_path / "model/a").read_bytes() == bytes(100)


@pytest.mark.usefixtures("small_notes")
@pytest.mark.parametrize("size", [99, 101])
def test_a_source_that_gives_another_number_of_bytes_the_second_time_is_refused(tmp_path, size):
    begun(tmp_path / "model", bytes(100), until=60)
    with staged_directory(tmp_path / "model", plan="a") as staged:
        with pytest.raises(SaveFailed, match="parts of 100 bytes in all"):
            staged.write("a", lambda start: [bytes(size - start)], size_bytes=100)
        assert not staged.has("a", size_bytes=100)
    notes = [json.loads(line) for line in (tmp_path / ".model.partial/record").read_text().splitlines()]
    assert not any(each.get("is_whole") for each in notes)


@pytest.mark.parametrize("pieces", [1, 3])
def test_what_a_section_was_made_of_is_let_go_before_the_next_one_is_made(tmp_path, pieces):
    """The largest tensor was there twice: its last piece was still in the hands of what writes it."""
    size, made = 2 << 20, []

    def section():
        assert not any(each() is not None for each in made)
        memory = np.zeros(size, dtype=np.uint8)
        made.append(weakref.ref(memory))
        view, step = memoryview(memory), -(-size // pieces)
        yield from (view[at : at + step] for at in range(0, size, step))

    with staged_directory(tmp_path / "a", plan="a") as staged:
        staged.write("f", lambda start: bytes_from([(size, section)] * 3, start), size_bytes=3 * size)
        staged.commit()
    assert len(made) == 3

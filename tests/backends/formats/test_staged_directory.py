"""What a staged directory keeps, refuses and leaves alone; tests/crash/faults/test_staged_directories.py kills its writer."""

import os
from contextlib import suppress

import pytest

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


def finish(path, files, *, plan="a"):
    """Write the files that are missing, and commit; return the names of those."""
    with staged_directory(path, plan=plan) as staged:
        written = [name for name, data in files.items() if staged.write(name, [data], size_bytes=len(data))]
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


@pytest.mark.parametrize("change", ["bytes", "longer", "gone", "link", "second_name", "directory", "other_size"])
def test_a_finished_file_that_is_not_as_it_was_is_written_again(tmp_path, change):
    path, file, outside = tmp_path / "model", tmp_path / ".model.partial/files/a", tmp_path.parent / f"outside-{change}"
    stopped_after(path, {"a": b"123"})
    outside.write_bytes(b"123")
    if change == "bytes":
        file.write_bytes(b"124")
    elif change == "longer":
        file.write_bytes(b"1234")
    elif change == "second_name":
        os.link(file, tmp_path.parent / "second-name-of-a")
    elif change != "other_size":
        file.unlink()
        if change == "link":
            file.symlink_to(outside)
        if change == "directory":
            file.mkdir()
            (file / "b").touch()
    data = b"1234" if change == "other_size" else b"123"
    assert finish(path, {"a": data}) == ["a"]
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


@pytest.mark.parametrize("record", [b"", b"{", b'{"plan": "a"', b"\xff\n", b'{"plan": "a"}\n{"name": "../a", "size_bytes": 1, "digest": ""}\n',
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
         staged_directory(path, plan="a"):  # fmt: skip
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


def test_a_directory_that_the_same_plan_has_committed_is_found_done_and_changed_ones_are_refused(tmp_path):
    """As after a kill between the rename and the removal of what was staged."""
    path, partial = tmp_path / "model", tmp_path / ".model.partial"
    stopped_after(path, {"a": b"1"})
    (partial / "files").rename(path)
    record = (partial / "record").read_bytes()
    with staged_directory(path, plan="a") as staged:
        assert staged.is_committed
        staged.commit()
    assert names_in(tmp_path) == ["model"]
    partial.mkdir()
    (partial / "record").write_bytes(record)
    (path / "a").write_bytes(b"2")
    with pytest.raises(InvalidArgument), staged_directory(path, plan="a"):
        pass


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
    with pytest.raises(NoSpace), staged_directory(tmp_path / "model", plan="a", size_bytes=1 << 60):
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

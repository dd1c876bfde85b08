"""A run through a filesystem of fsspec: the same laws as through obstore, in memory; on servers see test_filesystems.py."""

import gc
import time

import fsspec
import hypothesis.strategies as st
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from hypothesis import given
from kit.backends.buckets.bucket_cases import check_racing_writers, new_name
from obstore.store import MemoryStore

import trainfold
from trainfold.adapters.cli import main
from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.backends.stores.object_store.over_fsspec.exceptions import GenericError, PreconditionError
from trainfold.backends.stores.object_store.over_fsspec.library import as_obstore, library_of
from trainfold.backends.stores.object_store.over_fsspec.s3_library import S3Library
from trainfold.core.errors import InvalidArgument, SaveFailed, TrainfoldError
from trainfold.core.state.state import Progress, TrainState
from trainfold.properties import contracts
from trainfold.stores import fsspec_store

MEMORY = fsspec.filesystem("memory")
STATE = TrainState(trainer=Progress(step=3))
KEYS = ("a", "b/c", "b/d", "e/f/g")


def test_a_run_in_a_filesystem_keeps_the_contract():
    """C03: the same rules as through obstore."""
    contracts.check_store(lambda: fsspec_store(MEMORY, new_name()))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "create", "replace", "late", "parts", "delete", "get", "head", "below", "names"]),
            st.sampled_from(KEYS),
            st.binary(max_size=6),
            st.integers(0, 7),
        ),
        max_size=20,
    )
)
def test_a_filesystem_answers_as_obstore_does(calls):
    """C03: any requests, one after the other, on both."""
    both = [Bucket(MemoryStore(), "memory://run"), Bucket(FsspecPrefix(MEMORY, new_name()), "memory://run")]
    first = [{}, {}]
    for verb, key, data, at in calls:
        answers = []
        for bucket, versions in zip(both, first, strict=True):
            match verb:
                case "put":
                    answers.append(bool(bucket.put(key, data)))
                case "create":
                    answers.append(bool(bucket.put_if(key, data, None)))
                case "replace" | "late":  # by the version that is there, or by one that was there once
                    found = bucket.get(key)
                    versions.setdefault(key, found and found.version)
                    expected = found and (found.version if verb == "replace" else versions[key])
                    answers.append(bool(expected and bucket.put_if(key, data, expected)))
                case "parts":
                    parts = [bytearray(data), bytearray(data)]
                    answers.append(bool(bucket.put_parts(key, iter(parts), chunk_bytes=8 << 20, at_once=2)))
                case "delete":
                    answers.append(bucket.delete([key, "no/such"]))
                case "get":
                    found = bucket.get(key, start=at, stop=at + 2) if data else bucket.get(key)
                    answers.append(found and found.data)
                case "head":
                    found = bucket.head(key)
                    answers.append((found and found.size_bytes, found and found.tag == bucket.get(key).tag))
                case "below":
                    found = bucket.below(key.partition("/")[0] if at % 2 else "")
                    answers.append({name: each.size_bytes for name, each in found.items()})
                    assert all(each.tag == bucket.head(name).tag for name, each in found.items())
                case "names":
                    objects, directories = bucket.names(key.partition("/")[0] if at % 2 else "")
                    answers.append((sorted(objects), sorted(directories)))
        assert answers[0] == answers[1], (verb, key)


def test_what_is_put_into_another_run_meanwhile_ends_no_list():
    """A list of objects in memory could not be read while threads of other runs put theirs: "dictionary changed size during iteration", five times."""
    bucket = Bucket(FsspecPrefix(MEMORY, new_name()), "memory://run")
    for number in range(30):
        bucket.put(f"a/{number}", b"1")

    def put_another(*_):
        MEMORY.store[f"/{new_name()}"] = MemoryFile(MEMORY)

    thresholds = gc.get_threshold()
    gc.callbacks.append(put_another)
    gc.set_threshold(1, 1 << 20, 1 << 20)  # in the middle of the walk: the collector runs at its first new objects
    try:
        found, names = bucket.below("a"), bucket.names("a")[0]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(put_another)
    assert len(found) == len(names) == 30


@pytest.mark.parametrize("size", [0, 1, 8 << 20, (8 << 20) + 1, (16 << 20) + 3])
def test_a_range_of_any_size_is_read_in_pieces(size):
    """N06: a piece is a request, and the end of the object is where it ends."""
    bucket, data = Bucket(FsspecPrefix(MEMORY, new_name()), "memory://run"), bytes(7) + bytes([1]) * size
    bucket.put("a", data)
    assert b"".join(bucket.chunks("a", 7, 1 << 40)) == data[7:]
    assert bucket.get("a", start=7, stop=7 + size + 5).data == data[7:]
    memory = memoryview(bytearray(size + 9))
    assert bucket.fill("a", memory, 3) == size + 4


class SlowMemory(MemoryFileSystem):
    """Between a look and the write is time for others."""

    def pipe_file(self, *args, **kwargs):
        time.sleep(0.001)
        super().pipe_file(*args, **kwargs)


def test_of_many_writers_one_creates_and_no_replacement_is_lost():
    """C03: the two promises of a commit, with eight threads and puts that take their time."""
    run = new_name()
    buckets = [Bucket(FsspecPrefix(SlowMemory(), run), "memory://run") for _ in range(8)]
    check_racing_writers(buckets)


def test_parts_that_raise_leave_nothing():
    """C03: of a file whose leaves are smaller than they were planned to be."""
    store = fsspec_store(MEMORY, new_name())
    with pytest.raises(SaveFailed):
        store.write("step-1/a", [bytes(9 << 20)], size_bytes=10 << 20)
    assert store.size("step-1/a") is None


class LooksFirst(fsspec.AbstractFileSystem):
    """As fsspec itself creates: whether the name is there, and then a write."""

    protocol = "looksfirst"


def asynchronous():
    found = MemoryFileSystem(skip_instance_cache=True)
    found.asynchronous = True
    return found


@pytest.mark.parametrize(
    ("filesystem", "found", "fix"),
    [
        (LocalFileSystem(), "fsspec.implementations.local.LocalFileSystem", "name the directory"),
        (DirFileSystem("/x", MEMORY), "DirFileSystem", "pass the filesystem inside"),
        (LooksFirst(), "LooksFirst", "mounted directory"),
        (asynchronous(), "asynchronous=True", "without"),
    ],
)
def test_a_filesystem_without_conditional_puts_is_refused_with_its_class(filesystem, found, fix):
    """C03, C11: nothing is emulated by looking first."""
    with pytest.raises(InvalidArgument) as refused:
        fsspec_store(filesystem, "bucket/run")
    assert found in refused.value.found
    assert fix in refused.value.fix


@pytest.mark.parametrize("path", ["bucket", "bucket/", "", "/", "bucket/../x", "bucket//x"])
def test_a_path_that_names_no_run_is_refused(path):
    with pytest.raises(InvalidArgument, match="the path of a run in a bucket"):
        fsspec_store(MEMORY, path)


def test_anything_but_a_filesystem_is_refused():
    with pytest.raises(InvalidArgument, match="a filesystem of fsspec, and a path in it"):
        fsspec_store("s3", "bucket/run")


def test_conditions_that_a_library_loses_on_the_way_are_found(monkeypatch):
    """C03: as an old botocore leaves out what it does not know."""
    put = type(library_of(MEMORY)).put
    monkeypatch.setattr(type(library_of(MEMORY)), "put", lambda self, path, data, condition, about: put(self, path, data, None, about))  # fmt: skip
    with pytest.raises(InvalidArgument, match="expected a store that refuses to create an object twice"):
        trainfold.save(STATE, fsspec_store(MEMORY, new_name()))


def test_a_url_that_only_fsspec_knows_names_a_run(capsys):
    """C03, W22: for save, load and the commands; what another program put there is not hidden by a cache."""
    url = f"memory://{new_name()}"
    trainfold.save(STATE, url)
    assert trainfold.load(url, like=STATE).trainer.step == 3
    assert main(["ls", url]) == 0
    assert url in capsys.readouterr().out
    assert isinstance(fsspec_store(MEMORY, url.removeprefix("memory://")), ObjectStore)


def test_a_library_that_is_not_installed_is_named():
    """C11: each filesystem has its own package."""
    with pytest.raises(InvalidArgument, match=r"run: .*dropboxdrivefs.*pass a store of your own"):
        trainfold.save(STATE, "dropbox://bucket/run")


def test_an_error_of_s3_without_an_answer_is_one_that_may_be_tried_again():
    """A cut connection and a time limit of botocore have None as their response, which ended in an AttributeError."""

    class ReadTimeoutError(Exception):
        response = None

    with pytest.raises(GenericError, match="ReadTimeoutError: no answer"), as_obstore(S3Library(None)):
        raise ReadTimeoutError("no answer")
    refused = OSError("late")
    refused.__cause__ = ReadTimeoutError()
    refused.response = {"Error": {"Code": "PreconditionFailed"}}
    assert isinstance(S3Library(None).error_of(refused), PreconditionError)


def test_a_bucket_that_is_not_there_is_not_an_empty_run(monkeypatch):
    """S3fs says the same of a bucket and of a prefix: `list()` was [], and the error of a save named the device."""

    def missing(*args, **kwargs):
        error = RuntimeError("(NoSuchBucket) when calling")
        error.response = {"Error": {"Code": "NoSuchBucket"}}  # as botocore has it
        raise FileNotFoundError("The specified bucket does not exist") from error

    store = fsspec_store(MemoryFileSystem(), new_name())
    assert store.list() == []
    for verb in ("ls", "find"):
        monkeypatch.setattr(MemoryFileSystem, verb, missing)
    for call in (store.list, lambda: trainfold.save(STATE, store)):
        with pytest.raises(TrainfoldError, match=r"a bucket, found .*: NoSuchBucket …; create it"):
            call()

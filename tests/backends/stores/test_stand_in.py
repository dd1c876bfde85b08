"""In a replay, whatever names its run gets the copy; the run itself is only read."""

import os
from pathlib import Path

import pytest
from obstore.store import MemoryStore as Bucket

from trainfold.adapters.flight.flight_log import FlightLog
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.runs.best.best_file import load_best, save_best
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore, open_store
from trainfold.backends.stores.object_store import open_url
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.tiers.two_tiers import TwoTiers
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.errors import NotWritable
from trainfold.core.rehearsal.orders import VARIABLE, Orders, ReplayOrders, encode_orders
from trainfold.core.resume.resume_plan import Refusal
from trainfold.core.state.state import Progress, TrainState


def state_at(step):
    return TrainState(trainer=Progress(step=step))


@pytest.fixture
def replaying(tmp_path, monkeypatch):
    """Begins a replay of a run, as for a program that inherits its orders; returns the directory of the copy."""
    monkeypatch.chdir(tmp_path)

    def begin(source):
        home = tmp_path / "replay"
        orders = Orders(str(home), str(home / "notes"), every=9, steps=9, linger_after=9, replay=ReplayOrders(source))
        monkeypatch.setenv(VARIABLE, encode_orders(orders))
        return home / "run"

    return begin


def contents(run):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}


SPELLINGS = {
    "relative": lambda run: "runs/a",
    "with a slash": lambda run: f"{run}/",
    "dots": lambda run: "runs/../runs/./a",
    "path": lambda run: run,
    "url": lambda run: f"file://{run}",
    "url of one slash": lambda run: f"file:{run}",
    "link": lambda run: "link",
    "link above": lambda run: "links/a",
    "store": LocalStore,
    "store by a link": lambda run: LocalStore("link"),
    "two tiers": lambda run: TwoTiers(run, "far"),
    "far tier": lambda run: TwoTiers("near", run),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_of_the_run_is_the_copy(spelling, replaying, tmp_path):
    """R04, C13: a path, a link, a URL and a store; to read, and to write. Nothing else is written in place of it."""
    run = tmp_path / "runs/a"
    save(state_at(4), run)
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "links").symlink_to(run.parent)
    before, copy = contents(run), replaying(str(run))
    named = SPELLINGS[spelling](run)
    assert isinstance(plan(named, like=state_at(0)), Refusal)
    save(state_at(5), named)
    assert read_inventory(named).current_steps.keys() == {5}
    assert load(named, like=state_at(0)).trainer.step == 5
    assert "copy" not in repr(FlightLog(named))
    assert str(copy) in repr(FlightLog(named))
    assert contents(run) == before
    assert read_inventory(LocalStore(copy)).current_steps.keys() == {5}
    assert not (tmp_path / "near").exists()
    assert not (tmp_path / "far").exists()


def test_another_directory_of_the_program_makes_no_difference_and_other_runs_stay(replaying, tmp_path, monkeypatch):
    run = tmp_path / "runs/a"
    save(state_at(4), run)
    before, copy = contents(run), replaying(str(run))
    monkeypatch.chdir(run)
    save(state_at(5), ".")
    save(state_at(6), "ema")  # below the run
    monkeypatch.chdir(tmp_path)
    save(state_at(7), "runs/ab")
    assert contents(run) == before
    assert read_inventory(copy).current_steps.keys() == {5}
    assert read_inventory(copy / "ema").current_steps.keys() == {6}
    assert contents(tmp_path / "runs/ab")


def test_a_store_that_a_program_uses_itself_writes_into_the_copy(replaying, tmp_path):
    """As on the page that composes a save by hand."""
    run = tmp_path / "runs/a"
    save(state_at(4), run)
    before, copy = contents(run), replaying(str(run))
    store = LocalStore("runs/a")
    with store.lock():
        store.write("a", [b"1"], size_bytes=1)
    assert (copy / "a").read_bytes() == b"1"
    with pytest.raises(NotWritable, match="only reads it"), TwoTiers("runs/a", "far").lock():
        pass
    assert contents(run) == before
    assert not (tmp_path / "far").exists()


@pytest.mark.parametrize(
    "named", ["s3://bucket/a", "s3:/bucket/a/", "s3://bucket//./a", "S3://bucket/a", "s3a://bucket/a", "store"]
)
def test_a_run_in_a_bucket_is_the_copy_by_each_of_its_urls(named, replaying, monkeypatch):
    bucket = Bucket()
    monkeypatch.setattr(open_url, "open_url", lambda url: ObjectStore(bucket, url="s3://bucket/a"))
    save(state_at(4), "s3://bucket/a")
    before, copy = sorted(each["path"] for each in bucket.list().collect()), replaying("s3://bucket/a")
    store = ObjectStore(bucket, url="s3://bucket/a")
    save(state_at(5), store if named == "store" else named)
    assert read_inventory(copy).current_steps.keys() == {5}
    for write in (lambda: store.commit("b", b"1"), lambda: store.write("b", [b"1"], size_bytes=1), lambda: store.delete("run.json")):  # fmt: skip
        with pytest.raises(NotWritable, match="pass the store"):
            write()
    assert sorted(each["path"] for each in bucket.list().collect()) == before


def test_it_is_said_once_which_directory_stands_for_the_run(replaying, tmp_path, caplog):
    copy = replaying(str(tmp_path / "runs/a"))
    for _ in range(3):
        open_store("runs/a")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "runs/a is only read" in said[0]
    assert str(copy) in said[0]
    assert os.fspath(Path("runs/a")) in said[0]


@pytest.mark.parametrize("kind", ["a path", "a store of a bucket"])
def test_the_best_of_a_replay_is_not_that_of_the_run(kind, replaying, tmp_path):
    """Also where a manager holds the lock with the store that the program passes."""
    is_path = kind == "a path"
    run = tmp_path / "runs/a" if is_path else ObjectStore(Bucket(), url="s3://bucket/a")
    best = make_best_record(metric="loss", direction="min")
    save(state_at(4), run)
    save_best(run, updated(best, {"loss": 0.5}, step=4))
    copy = replaying(str(run) if is_path else run.url)
    with CheckpointManager(run, every=1) as manager:
        manager.save(state_at(5))
        if not is_path:
            save_best(run, updated(best, {"loss": 0.25}, step=5))
    if is_path:
        save_best(run, updated(best, {"loss": 0.25}, step=5))
    assert load_best(copy, best).step == 5
    assert load_best(run, best).step == 5
    replaying(str(tmp_path / "runs/other"))
    assert load_best(run, best).step == 4

"""Copies between a disk and a bucket over HTTP, both ways, through a network that fails, and killed at any request; and a run in two tiers whose machine is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.backends.buckets.proxy import one_in_four
from kit.backends.buckets.s3_cases import KEYS, settings_at, store_at
from kit.backends.tier_cases import lose_machines, state_at
from obstore.store import MemoryStore, S3Store

import trainfold
from trainfold.adapters.cli.tiers.copy import copy_path
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.tiers.copy_run import copy_run, plan_copy
from trainfold.core.errors import InvalidArgument

PROGRAM = "import sys; from trainfold.adapters.cli import main; sys.exit(main(sys.argv[1:]))"


def contents(store):
    """The files of the checkpoints, and the file that makes it a run."""
    names = [f"{name}/{file}" for name in store.list() if name.startswith("step-") for file in store.list(name)]
    return {name: store.read(name) for name in ["run.json", *names]}


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        trainfold.save(state_at(step), tmp_path / "run")
    return LocalStore(tmp_path / "run")


def test_a_copy_to_a_bucket_and_back_has_every_byte(proxy, run, tmp_path):
    """Through a network of which one request in four fails."""
    bucket, back = store_at(proxy.port), LocalStore(tmp_path / "back")
    proxy.fault, seen = one_in_four(seed=5)
    copy_run(run, bucket)
    copy_run(bucket, back)
    proxy.fault = lambda number, method, path: None
    assert len(seen) > 5
    assert contents(run) == contents(bucket) == contents(back)
    assert {each.action for each in plan_copy(run, bucket).checkpoints} == {"there"}
    assert bucket.pointers() == {"latest": "step-00000002"}


def test_two_stores_of_one_place_are_recognised(monkeypatch):
    """E01: two objects of a bucket were two places, and to the command each URL is one: a copy onto itself said that all was there."""
    place = ("bucket", "runs/a")

    def at(bucket="bucket", run="runs/a", port=9, **more):
        client = S3Store(bucket, prefix=run, endpoint=f"http://127.0.0.1:{port}", **{**KEYS, **more})
        return ObjectStore(client, url=f"s3://{bucket}/{run}")

    for other in (at(), at(AWS_REGION="us-east-2"), at(run="runs/a/b"), at(run="runs")):
        for pair in ((at(*place), other), (other, at(*place))):
            with pytest.raises(InvalidArgument, match="another place than the source, and neither inside the other"):
                plan_copy(*pair)
    assert at().place != at(port=10).place
    assert at(run="runs/ab").place[: len(at().place)] != at().place
    one, other = (ObjectStore(MemoryStore(), url="memory://run") for _ in range(2))
    trainfold.save(state_at(1), one)
    assert copy_run(one, other).makes_run, "names of memory say nothing"
    for name, value in settings_at(9).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="another place"):
        copy_path(Path("s3://bucket/runs/a"), Path("s3a://bucket//runs/./a"), dry_run=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
def test_a_command_that_is_killed_at_any_request_is_continued(proxy, run, tmp_path, is_up):
    """SIGKILL at every second request: nothing torn is taken for a checkpoint, and the same command ends with exit code 0."""
    bucket = store_at(proxy.port)
    if not is_up:
        copy_run(run, bucket)
    environ = {**os.environ, **settings_at(proxy.port)}
    places = [run.url, bucket.url] if is_up else [bucket.url, str(tmp_path / "back")]
    began, at, was_killed, kills = 0, 1, True, 0
    while was_killed:
        began, processes = len(proxy.requests), []

        def fault(number, method, path, last=began + at, processes=processes):
            if number < last:
                return None
            processes[0].kill()
            return "cut"

        proxy.fault = fault
        processes.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM, "copy", *places], env=environ, stdout=subprocess.DEVNULL)
        )
        code = processes[0].wait()
        was_killed = code == -9
        kills += was_killed
        proxy.fault = lambda number, method, path: None
        target = store_at(proxy.port, run=bucket.url.removeprefix("s3://bucket/")) if is_up else LocalStore(places[1])
        for name in target.list():
            if name.startswith("step-") and target.size(f"{name}/manifest.json"):
                trainfold.load(target, like=state_at(0), step=int(name[5:]))
        at += 2
    assert code == 0
    assert kills > 5
    assert contents(target) == contents(run)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings(
    "ignore::trainfold.backends.runs.load.CheckpointPassedOver"
)  # of uploads that did not finish
@pytest.mark.parametrize("first", range(2))
def test_a_machine_that_is_lost_loses_only_what_was_not_said_to_be_uploaded(proxy, tmp_path, first):
    """SIGKILL at some request, and the disk is gone; the next program, in another place, goes on from what was said to be uploaded, or from a later one that was."""
    far = store_at(proxy.port)
    environ = settings_at(proxy.port)
    name = far.url.removeprefix("s3://bucket/")
    lose_machines(proxy, far.url, environ, lambda: store_at(proxy.port, run=name), tmp_path, first=25 + first * 7)

"""The lease of a run: one holder at a time, whatever clocks say, however long a holder sleeps, and whichever answer is lost."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.backends.buckets.s3_cases import store_at
from obstore.store import MemoryStore

import trainfold
from trainfold.adapters.cli.ls import list_store
from trainfold.backends.lock_holder import start_of, this_machine
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.object_store import writer_lease
from trainfold.backends.stores.object_store.bucket import Found, Stored
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.writer_lease import LEASE, LeaseRecord, WriterLease
from trainfold.backends.stores.protocol import glimpse
from trainfold.core.errors import CheckpointHostile, InvalidArgument, RunLocked, RunReplaced, SaveFailed
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState


class FakeBucket:
    """A bucket whose time is a number, and in which every object has one version after the other."""

    def __init__(self):
        self.now, self.objects, self.version = 0.0, {}, 0

    def where(self, key):
        return f"fake://run/{key}"

    def get(self, key):
        return self.objects.get(key)

    def head(self, key):
        found = self.objects.get(key)
        return None if found is None else Found(len(found.data), found.modified, found.tag)

    def put(self, key, data):
        self.version += 1
        self.objects[key] = Stored(data, {"e_tag": str(self.version)}, None, float(int(self.now)))

    def put_if(self, key, data, expected):
        found = self.objects.get(key)
        if (None if found is None else found.version) != expected:
            return None
        self.put(key, data)
        return self.objects[key].version

    def delete_own(self, key):
        self.objects.pop(key, None)


def state_at(step):
    model = ModelState(Leaves({"w": torch.full((4,), float(step))}), Leaves())
    return trainfold.TrainState(trainer=trainfold.Progress(step=step), model=model)


@pytest.fixture
def machines(monkeypatch):
    """Which machine this process is on; a function that changes it."""
    monkeypatch.setattr(writer_lease, "_TIME_STEP_SECS", 0.0)
    monkeypatch.setattr(writer_lease, "_LOOK_SECS", 0.01)

    def be(name):
        monkeypatch.setattr(writer_lease, "this_machine", lambda: name)

    be("a")
    return be


@pytest.fixture
def sleeping(monkeypatch):
    """No lease is renewed by itself: its holder sleeps."""
    monkeypatch.setattr(WriterLease, "_renew_until", lambda *args: None)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["take", "renew", "release", "wait", "wait"]), st.floats(0, 40)),
    max_size=25,
)


@given(STEPS)
def test_a_lease_is_taken_over_only_after_it_ended_and_its_holder_is_refused_from_then_on(steps):
    """C03: three machines with a common store; each sleeps as long as it likes."""
    bucket, lasts = FakeBucket(), 10.0
    leases = [WriterLease(bucket, lasts) for _ in range(3)]
    renewed, holder, counts = {}, None, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriterLease, "_renew_until", lambda *args: None)
        patch.setattr(writer_lease, "_now_here", lambda: bucket.now)
        patch.setattr(time, "sleep", lambda secs: setattr(bucket, "now", bucket.now + secs))
        patch.setattr(time, "time", lambda: pytest.fail("a clock that can be set"))
        for who, what, secs in steps:
            patch.setattr(writer_lease, "this_machine", lambda who=who: f"machine {who}")
            lease = leases[who]
            if what == "wait":
                bucket.now += secs
            elif what == "take" and not lease.is_held:
                lease.acquire()  # waits until it is over: the holder does not renew meanwhile
                assert holder is None or bucket.now - renewed[holder] > lasts
                holder, renewed[who] = who, bucket.now
                counts.append(lease.broken)
            elif what == "renew" and lease.is_held:
                if who == holder:
                    lease.confirm()
                    renewed[who] = bucket.now
                else:
                    with pytest.raises(RunLocked):
                        lease.confirm()
            elif what == "release" and lease.is_held:
                lease.release()
                holder = None if who == holder else holder
            if holder is not None and bucket.now <= renewed[holder] + lasts:
                leases[holder].check()
            for other, each in enumerate(leases):
                if other != holder and each.is_held:
                    with pytest.raises(RunLocked):
                        each.confirm()
    assert counts == sorted(counts)


def test_a_living_holder_of_this_machine_is_named_and_nothing_waits(monkeypatch):
    """C03, W22: such as a second manager in the same program."""
    client = MemoryStore()
    with ObjectStore(client, url="memory://run").lock():
        monkeypatch.setattr(writer_lease.time, "sleep", lambda secs: pytest.fail("it waits"))
        with pytest.raises(RunLocked, match=f"found process {os.getpid()} on .*, which is this one"):
            ObjectStore(client, url="memory://run").lock().__enter__()


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["taken, not given back", "answer lost"])
@pytest.mark.parametrize("kind", [SaveFailed, InvalidArgument])
def test_a_lease_that_no_object_of_this_process_holds_is_over(sleeping, is_carried_out, kind):
    """C03: a network that was cut at its end locked the process that lives out of its own run for good. And whatever is wrong with the store then, a run that is over has not failed."""
    bucket = FakeBucket()
    put_if = bucket.put_if

    def failing(key, data, expected):
        if is_carried_out:  # of a lease that is taken
            put_if(key, data, expected)
        raise kind("fake://run", expected="an answer", found="none", fix="look at the network")

    first, second, third = (WriterLease(bucket, 10.0) for _ in range(3))
    if not is_carried_out:
        first.acquire()
    bucket.put_if = failing
    if is_carried_out:
        with pytest.raises(kind):
            first.acquire()
    else:
        first.release()
    bucket.put_if = put_if
    assert second.acquire(), "and says that it was not given back"
    assert second.broken == 1
    with pytest.raises(RunLocked, match="which is this one"):
        third.acquire()
    second.release()
    assert not third.acquire()


def test_a_holder_elsewhere_is_left_alone_while_it_renews_and_followed_when_it_does_not(machines, monkeypatch):
    """C03: the second of two machines sees a renewal; the third sees none."""
    client = MemoryStore()
    one, two = (ObjectStore(client, url="memory://run", lease_secs=0.3) for _ in range(2))
    with one.lock():
        machines("b")
        with pytest.raises(RunLocked):
            two.lock().__enter__()
        monkeypatch.setattr(WriterLease, "_renew", lambda *args: None)  # it sleeps from now on
        with two.lock():
            assert two.least_revision == 1


def test_a_holder_that_sleeps_and_wakes_after_a_takeover_changes_nothing(machines, sleeping):
    """C03, E01: each of its calls is refused, and a file that was on its way has a name that the new holder does not use."""
    client = MemoryStore()
    one, two = (ObjectStore(client, url="memory://run", lease_secs=0.05) for _ in range(2))
    trainfold.save(state_at(2), one)
    late = one.lock()
    late.__enter__()
    machines("b")
    trainfold.save(state_at(3), two)
    with two.lock():
        machines("a")
        for call in (
            lambda: one.write("step-00000004/x", [b"1"], size_bytes=1),
            lambda: one.commit("step-00000004/manifest.json", b"{}"),
            lambda: one.delete("step-00000003/"),
            lambda: one.delete("step-00000003/manifest.json"),
        ):
            with pytest.raises(RunLocked, match="expected the lease that this process has taken"):
                call()
        late.__exit__(None, None, None)  # gives nothing back
        machines("b")
        two.commit("step-00000005/manifest.json", b"{}")
    assert trainfold.load(two, like=state_at(3), step=3).trainer.step == 3


def test_files_of_a_lost_writer_never_have_names_of_the_next(machines, sleeping):
    """E01: an upload that ends late would otherwise replace a file of an acknowledged checkpoint."""
    client = MemoryStore()
    lost, two, three = (ObjectStore(client, url="memory://run", lease_secs=0.05) for _ in range(3))
    model = state_at(3)
    late = lost.lock()
    late.__enter__()
    machines("b")
    trainfold.save(model, two)
    saved = {name: two.read(f"step-00000003/{name}") for name in two.list("step-00000003")}
    assert any(".r1." in name for name in saved)
    for name in saved:
        if ".r1." in name:  # what the lost one would still write
            lost._bucket.put(f"step-00000003/{name.replace('.r1.', '.')}", b"late")
    assert trainfold.load(two, like=model).trainer.step == 3
    trainfold.save(state_at(4), three)
    assert any(".r1." in name for name in three.list("step-00000004")), "it may still write"


def test_a_killed_holder_of_this_machine_is_followed_at_once(s3):
    """C03: its lease would last for another 30 s."""
    run = f"runs/killed-{time.time_ns()}"
    program = (
        "import sys; from kit.backends.buckets.s3_cases import store_at\n"
        f"held = store_at({s3.port}, run={run!r}).lock(); held.__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    path = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "src")])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        store = store_at(s3.port, run=run)
        with pytest.raises(RunLocked, match=f"process {holder.pid} on"):
            store.lock().__enter__()
        holder.kill()
        with store.lock():
            assert store.least_revision == 1


@pytest.fixture
def held_by(sleeping, monkeypatch):
    """A function that makes a bucket whose lease another process of this machine took, and does not renew."""

    def make(pid, started, host="pod-1"):
        bucket = FakeBucket()
        monkeypatch.setattr(time, "sleep", lambda secs: setattr(bucket, "now", bucket.now + secs))
        holder = f"process {pid} on {host} ({writer_lease.this_machine()})"
        record = writer_lease.LeaseRecord(holder, "token", 1, 10.0, 0, started=started)
        bucket.put_if(writer_lease.LEASE, record.encoded(0), None)
        return bucket

    return make


@pytest.fixture
def living():
    """The number of a process that lives."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_a_killed_holder_is_followed_at_once_whatever_the_machine_is_called(held_by):
    """C03: containers with the host's processes have names of their own, and the run was locked for good."""
    with subprocess.Popen(["true"]) as process:
        started = start_of(process.pid)
    bucket = held_by(process.pid, started)
    began = bucket.now
    assert WriterLease(bucket, 10.0).acquire()
    assert bucket.now == began


def test_another_process_with_the_number_of_a_killed_holder_keeps_no_lock(held_by, living):
    """C03: numbers are small in a container that starts again, and were used again at once."""
    bucket = held_by(living, f"{int(start_of(living)) - 1}")
    began = bucket.now
    assert WriterLease(bucket, 10.0).acquire()
    assert bucket.now == began
    with pytest.raises(RunLocked, match=f"process {living} on pod-1"):
        WriterLease(held_by(living, start_of(living)), 10.0).acquire()


@pytest.mark.parametrize("pid", ["living", "none"])
def test_a_holder_of_which_nothing_is_known_is_followed_when_it_does_not_renew(held_by, living, pid):
    """C03: such as that of an older version, which wrote no start."""
    bucket = held_by(living if pid == "living" else "?", "" if pid == "living" else "7")
    began = bucket.now
    assert WriterLease(bucket, 10.0).acquire()
    assert bucket.now - began > 10.0


def test_a_living_holder_that_cannot_be_seen_is_watched(held_by, living, monkeypatch):
    """C03: with hidepid, a second user of the machine took the run of a holder that renewed."""
    bucket = held_by(living, start_of(living))
    record = writer_lease.LeaseRecord.decoded(bucket.get(writer_lease.LEASE).data, "")
    monkeypatch.setattr(writer_lease, "is_dead", lambda pid, started: None)

    def renewed(secs):
        bucket.now += secs
        bucket.put_if(writer_lease.LEASE, record.encoded(1), bucket.get(writer_lease.LEASE).version)

    monkeypatch.setattr(time, "sleep", renewed)
    with pytest.raises(RunLocked, match=f"process {living} on pod-1"):
        WriterLease(bucket, 10.0).acquire()
    monkeypatch.setattr(time, "sleep", lambda secs: setattr(bucket, "now", bucket.now + secs))
    assert WriterLease(bucket, 10.0).acquire()


def test_the_directories_of_a_holder_are_under_way_and_those_of_one_before_it_are_not(held_by, living):
    """W22: a list called a save under way torn. To find out who writes it puts nothing."""
    now = time.time()
    changed = {"step-00000001": now - 9000, "step-00000002": now, "step-00000003": 0.0}

    def under_way(pid, started, at=now):
        bucket = held_by(pid, started)
        found = bucket.objects[LEASE]
        bucket.objects = {LEASE: Stored(found.data, found.version, None, at)}
        before = dict(bucket.objects)
        words = WriterLease(bucket, 10.0).writers(changed)
        assert bucket.objects == before
        return words

    holder = f"process {living} on pod-1"
    assert under_way(living, start_of(living)) == dict.fromkeys(["step-00000002", "step-00000003"], holder)
    assert under_way(living, f"{int(start_of(living)) - 1}") == {}, "another one has its number"
    assert under_way(living, "") == dict.fromkeys(changed, f"{holder}, if that still runs")
    assert under_way(living, "", at=now - 1000) == {}
    assert WriterLease(FakeBucket(), 10.0).writers(changed) == {}


def test_a_save_under_way_in_a_bucket_is_listed_as_one():
    """W22, C03: with the holder that this process is, and after it."""
    store = ObjectStore(MemoryStore(), url="memory://run")
    trainfold.save(state_at(1), store)
    store.write("step-00000002/model-00000-of-00001.safetensors", [b"half"], size_bytes=4)
    with store.lock():
        found = list_store(glimpse(store), read_inventory(store)).data["checkpoints"][-1]
        assert found["writer"].startswith(f"process {os.getpid()} on ")
        assert found["problem"] is None
    found = list_store(store, read_inventory(store)).data["checkpoints"][-1]
    assert (found["writer"], found["problem"]["error"]) == (None, "CheckpointTorn")


def test_a_forked_child_does_not_write_for_its_parent():
    """C03: as with a lock of a file."""
    store = ObjectStore(MemoryStore(), url="memory://run")
    with store.lock():
        child = os.fork()
        if child == 0:
            try:
                store.write("step-1/a", [b"1"], size_bytes=1)
            except RunLocked as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        store.commit("run.json", b"{}")


def test_a_renewal_whose_answer_was_lost_is_recognised(proxy):
    """C03: each second put of the lease is carried out, and then looks like a failure."""
    puts = []

    def fault(number, method, path):
        if method == "PUT" and path.endswith(LEASE):
            puts.append(number)
            return ("done 500", "lost", "repeat")[len(puts) % 3]
        return None

    proxy.fault = fault
    store = store_at(proxy.port)
    with store.lock():
        for _ in range(4):
            store._lease.confirm()
        store.commit("run.json", b"{}")
    assert len(puts) >= 6
    with store.lock():
        assert store.least_revision == 0, "it was given back each time"


@pytest.mark.parametrize("is_renewed", [True, False], ids=["renewed", "given back at once"])
def test_a_renewal_that_failed_and_was_carried_out_is_found_by_the_next(sleeping, is_renewed):
    """C03: the network was away for longer than a put is tried again. The lease was not given back then, and a process of the same machine was refused for as long as this one lived."""
    bucket = FakeBucket()
    lease = WriterLease(bucket, 10.0)
    lease.acquire()
    put_if = bucket.put_if

    def failing(key, data, expected):
        put_if(key, data, expected)
        raise SaveFailed("s3://bucket/run", expected="an answer", found="none", fix="look at the network")

    bucket.put_if = failing
    with pytest.raises(SaveFailed):
        lease.confirm()
    bucket.put_if = put_if
    if is_renewed:
        lease.confirm(committing="a")
        assert LeaseRecord.decoded(bucket.get(LEASE).data, "").recent == (("a", ""),)
    lease.release()
    other = WriterLease(bucket, 10.0)
    other.acquire()
    assert other.broken == 0


def test_a_renewal_that_fails_in_any_way_is_not_the_last():
    """C03: an error without a name, such as that memory is short, ended the thread; 30 s later another process could take the run of one that lives."""
    bucket = FakeBucket()
    lease = WriterLease(bucket, 0.03)
    lease.acquire()
    put_if, tries, renewed = bucket.put_if, [], threading.Event()

    def failing(key, data, expected):
        tries.append(key)
        if len(tries) == 1:
            raise MemoryError
        renewed.set()
        return put_if(key, data, expected)

    bucket.put_if = failing
    assert renewed.wait(20)
    lease.release()


def test_a_run_that_was_removed_is_said_to_be():
    """As with a directory that was removed."""
    client = MemoryStore()
    store = ObjectStore(client, url="memory://run")
    with store.lock():
        client.delete(LEASE)
        with pytest.raises(RunReplaced, match="the run was removed"):
            store.commit("run.json", b"{}")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"holder": 1}', b"null", b"\xff" * 5000, b'{"a": ' + b"[" * 5000]
)
def test_what_is_not_a_lease_is_hostile(data):
    """W22: an error with a name, not that of a parser."""
    client = MemoryStore()
    client.put(LEASE, data)
    with pytest.raises(CheckpointHostile, match="a lease of trainfold"):
        ObjectStore(client, url="memory://run").lock().__enter__()


def test_a_machine_without_namespaces_of_time_is_known(monkeypatch):
    """W22: Linux has them since 5.6; before it a killed holder of the same machine was waited for, as one of another machine."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "time" and exists(path))
    assert this_machine() == this_machine()
    assert this_machine().endswith(":")


def test_a_living_holder_is_not_gone_where_starts_are_counted_from_another_time():
    """C03: a container that was restored on another machine has a namespace of time, in which /proc shows other starts: another process, by the number."""
    with subprocess.Popen(["sleep", "60"]) as holder:
        record = LeaseRecord(
            f"process {holder.pid} on a ({this_machine()})", "token", 1, 30.0, 0, (), start_of(holder.pid)
        )
        program = f"from trainfold.backends.stores.object_store.writer_lease import *; from trainfold.backends.stores.object_store.writer_lease import _is_gone; print(_is_gone({record!r}))"
        found = subprocess.run(
            ["unshare", "--time", "--boottime", "100000", "--fork", sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
        )
        holder.kill()
    if "unshare" in found.stderr:
        pytest.skip(f"no namespaces of time here: {found.stderr}")
    assert found.stdout.strip() == "None"

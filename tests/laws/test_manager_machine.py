"""A manager over a disk that fails and crashes, beside a simple model: what it has promised, and what may be there besides.

The saver's thread is real. Between two rules it stands still: at a gate, with a save in its hands, or with nothing to do.
"""

import atexit
import os
import threading
import warnings
from contextlib import suppress
from functools import cache

import fsspec
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kit.backends.best_file_cases import best_name
from kit.backends.buckets import azure_cases, bucket_cases, filesystem_cases, gcs_cases, s3_cases
from kit.laws.bucket_cases import GatedBucket
from kit.laws.manager_machine_cases import (
    COMPONENTS,
    PAUSE,
    SAVING,
    STOPPING,
    WANTED,
    DiskModel,
    GatedStore,
    LiveLoop,
    StateLoop,
    digest_of,
)
from obstore.store import MemoryStore as ClientOfMemory

from trainfold.backends.runs.api import load
from trainfold.backends.runs.best.best_file import BestIgnored, load_best, save_best
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import MemoryStore, SimulatedCrash
from trainfold.backends.stores.object_store import writer_lease
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.core.best.record import updated
from trainfold.core.errors import CheckpointError, ResumeRefused, SaveFailed
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.inventory import lineage

EXAMPLES, STEPS = {"laws": (600, 40), "soak": (20_000, 60)}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), (14, 25))

faults = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.sampled_from(["crash", "crash", "error", "full"]), st.integers(0, 24)),
)
requests = st.sampled_from(["save", "save", "stop", "save_and_stop", "abort"])
salts = st.integers(0, 3)
rarely = st.sampled_from([False, False, False, True])


class ManagerAndDisk(DiskModel, RuleBasedStateMachine):
    """The rules are train, save, load, crash and damage; the invariants hold after each of them."""

    @initialize(
        mode=st.sampled_from(["sync", "async", "async"]),
        loop=st.sampled_from([StateLoop, LiveLoop]),
        keep_last=st.sampled_from([None, 1, 2]),
        long_term=st.sampled_from([None, 3]),
        every=st.sampled_from([None, 2]),
        when_busy=st.sampled_from(["wait", "skip"]),
        room=st.sampled_from([None, 0]),
    )
    def start(self, mode, loop, keep_last, long_term, every, when_busy, room):
        self.mode, self.loop, self.every, self.when_busy, self.room = mode, loop(), every, when_busy, room
        self.keep_last, self.long_term = keep_last, long_term
        self.store = self.new_store()
        self.contents, self.path, self.damaged, self.quarantined = {}, [], set(), set()
        self.unsure, self.undead, self.leaving, self.outside = {}, {}, {}, set()
        self.best, self.best_perhaps, self.points_at = None, None, None
        self.timelines = {}
        self.looked = {}
        self.is_armed = False
        self.open()

    def new_store(self):
        """An empty disk."""
        return GatedStore(MemoryStore())

    # --- training ------------------------------------------------------------------------------------------------

    @rule(salt=salts, overwrites=st.booleans())
    def train(self, salt, overwrites):
        """D02: train by an optimizer step, which a hook announces to the manager, or by other writes, which the loop announces."""
        if self.room == 0:
            self.release_writer()  # otherwise it waits forever
        if overwrites:
            self.manager.wait_staging()
            self.loop.overwrite(salt)
        else:
            self.loop.train(salt)

    def ask(self, request):
        self.source.ask(request)
        self.waiting.add(request)

    # --- the writer's thread -------------------------------------------------------------------------------------

    def hold_writer(self):
        """Block the next save before its first write."""
        if self.mode == "async" and not self.store.is_waiting:
            self.store.gate.clear()

    def release_writer(self):
        self.store.gate.set()
        while self.store.is_waiting:
            PAUSE.wait(0.0001)
        self.settle()
        self.finished(None)

    @rule(how=st.sampled_from(["poll", "go on", "drain", "close"]))
    def is_told(self, how):
        getattr(self, how.replace(" ", "_"))()

    def go_on(self):
        self.release_writer()

    # --- saving --------------------------------------------------------------------------------------------------

    @rule(trains=st.sampled_from([1, 1, 2, 0]), holds=st.booleans(), fault=faults)
    def save(self, trains, holds, fault):
        self.come(trains)
        is_skipped = self.store.is_waiting and self.when_busy == "skip"
        if not is_skipped:
            self.release_writer()
            if holds:
                self.hold_writer()
        self.prepare(None if is_skipped else fault)
        value = self.call(lambda: self.manager.save(self.loop.run))
        if self.finished(value):
            return
        if not isinstance(value, SaveFailed):
            assert value.step == self.step_now
            assert value.status == ("skipped" if is_skipped else "written" if self.mode == "sync" else "staged")
            self.asked = self.asked if is_skipped else set()
        elif self.mode == "sync":
            self.asked = set()
        self.next = None

    @rule(salt=salts, overwrites=st.booleans(), asks=st.none() | requests)
    def overtake(self, salt, overwrites, asks):
        """D02, D04: the loop updates everything and reaches the next boundary while the writer is blocked."""
        if not self.is_armed:
            self.save(trains=1, holds=True, fault=None)
            self.train(salt, overwrites=overwrites)
            self.step(trains=0, holds=False, asks=asks, is_last=False, is_best=False, fault=None)
            self.go_on()
            self.step(trains=0, holds=False, asks=None, is_last=False, is_best=False, fault=None)

    @rule(index=st.integers(0, 20), again=st.booleans())
    def fail_and_be_due_again(self, index, again):
        """D05, A14: a failed save does not count, so the same boundary saves again."""
        if not self.is_armed:
            if again:
                self.save(trains=0, holds=False, fault=None)
                self.drain()
            self.save(trains=0 if again else 1, holds=False, fault=("error", index))
            self.poll()
            self.step(trains=0, holds=False, asks=None, is_last=True, is_best=False, fault=None)

    @rule(index=st.integers(0, 5), damages=st.booleans())
    def go_another_way(self, index, damages):
        """E16, P07: continue from an older checkpoint, on request or because the newest is damaged."""
        if not self.is_armed:
            for _ in range(2):
                self.save(trains=1, holds=False, fault=None)
            if damages:
                self.damage(index)
            self.load(None if damages else index)
            for _ in range(2):
                self.save(trains=1, holds=False, fault=None)

    def come(self, trains):
        """Advance to the next boundary."""
        for _ in range(trains):
            self.train(trains, overwrites=False)

    @rule(
        trains=st.sampled_from([1, 1, 2, 0]),
        holds=st.booleans(),
        asks=st.none() | requests,
        is_last=rarely,
        is_best=rarely,
        fault=faults,
    )
    def step(self, trains, holds, asks, is_last, is_best, fault):
        self.come(trains)
        if asks is not None:
            self.ask(asks)
        self.boundary(fault, holds=holds, is_last=is_last, is_best=is_best)

    def boundary(self, fault, *, holds=False, is_last=False, is_best=False, finishes=False):
        if finishes:
            self.release_writer()
        if finishes and self.aborted:
            value = self.call(lambda: self.manager.finish(self.loop.run))
            assert self.finished(value) or value is None or isinstance(value, SaveFailed)
            return
        self.asked, self.waiting = self.asked | self.waiting, set()
        saves, stops = self.decide(is_last=is_last, is_best=is_best)
        if saves and self.store.is_waiting and (stops or is_best or self.when_busy == "wait"):
            if self.when_busy == "skip" and not self.is_armed and fault is None and self.save_.step != self.step_now:
                threading.Timer(0.01, self.store.gate.set).start()  # the best and the last are not skipped
                self.store.is_waiting = False
            else:
                self.release_writer()
                saves, stops = self.decide(is_last=is_last, is_best=is_best)  # the writer has crashed, or failed
        is_skipped = saves and self.store.is_waiting
        if holds:
            self.hold_writer()
        has_failure = self.save_ is not None and not self.store.is_waiting and self.is_armed
        self.prepare(None if is_skipped or has_failure else fault)
        step, digest = self.next.step, self.next.digest
        action = (
            self.manager.finish if finishes else lambda run: self.manager.step(run, is_last=is_last, is_best=is_best)
        )
        value = self.call(lambda: action(self.loop.run))
        if self.finished(value):
            return
        self.next = None
        if isinstance(value, SaveFailed):
            self.stops, self.aborted = self.manager.should_stop, self.manager._due.is_aborted
            self.asked = self.asked if self.manager._due._asked else set()
            return
        assert self.manager.should_stop == (self.stops or stops)
        self.stops, self.aborted = self.manager.should_stop, self.aborted or "abort" in self.asked
        assert (value is not None) == saves
        assert not saves or (value.status == "skipped") == is_skipped
        self.asked = self.asked if is_skipped else set()
        if finishes and saves:
            assert self.contents[step] == digest, "the final state is not there"

    def decide(self, *, is_last, is_best):
        """Decide whether this boundary saves, and whether the run stops."""
        step, last = self.step_now, self.last_saved
        is_due = False
        if self.every is not None and step > 0:
            is_due = (
                step % self.every == 0
                if last is not None and last > step
                else step // self.every > (last or 0) // self.every
            )
        wants = is_due or is_last or is_best or self.asked & SAVING
        saves = bool(wants) and "abort" not in self.asked and step != last
        return saves, is_last or bool(self.asked & STOPPING)

    @rule(fault=faults)
    def finish(self, fault):
        """A14: the final state is saved exactly once, no matter what was saved before."""
        self.boundary(fault, is_last=True, finishes=True)

    def poll(self):
        under_way, is_waiting = self.save_, self.store.is_waiting
        value = self.call(self.manager.poll)
        if not self.finished(value) and (under_way is None or is_waiting):
            assert value is None

    def drain(self):
        self.release_writer()
        under_way = self.save_
        value = self.call(self.manager.drain)
        if not self.finished(value):
            assert self.save_ is None
            assert (value is None) == (under_way is None)

    def close(self):
        """D07: it waits for the save, raises a failure that was not raised yet, and may be called again."""
        self.release_writer()
        value = self.call(self.manager.close)
        if self.finished(value):
            return
        assert self.save_ is None
        assert self.call(self.manager.close) is None
        self.open()
        # the state in memory is what the closed manager saved, or a continuation of it
        self.manager._loads.first.is_cleared = True

    # --- the best ------------------------------------------------------------------------------------------------

    @rule(score=st.integers(0, 9), fault=faults)
    def name_the_best(self, score, fault):
        self.drain()
        step = self.step_now
        if step not in self.path or self.contents[step] != digest_of(self.loop.state):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BestIgnored)
            known = load_best(self.store, WANTED)
        new = updated(known, {"loss": float(score)}, step=step)
        if new is known or step in self.damaged:
            return
        old, self.best_perhaps = self.best, directory_of(step)
        self.arm(fault)
        try:
            save_best(self.store, new)
            self.best, self.best_perhaps = (step, score, self.timelines[step]), None
            assert self.is_armed or self.store.point_target("best") == directory_of(step)
        except (SaveFailed, SimulatedCrash) as error:
            if self.finished(error if self.is_dead else None):
                return
            if best_name(self.store) == directory_of(step):
                self.best = (step, score, self.timelines[step])
                self.best_perhaps = None if old is None else directory_of(old[0])
        self.bury()

    # --- loading -------------------------------------------------------------------------------------------------

    def load_newest(self):
        good = [step for step in self.path if step not in self.damaged]
        if not good:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointPassedOver)
            self.loop.loaded(self.manager.load(self.loop.run))
        self.quarantined |= {step for step in self.path if step > good[-1]}
        self.after_load(good[-1])

    @rule(index=st.none() | st.integers(0, 5))
    def load(self, index):
        """E16: a save after loading an older checkpoint starts a new timeline."""
        self.drain()
        if index is None:
            self.load_newest()
        elif self.path:
            step = self.path[index % len(self.path)]
            decision = self.manager.should_load(self.loop.run, step=step)
            if step in self.damaged:
                with pytest.raises(CheckpointError):
                    self.manager.load(self.loop.run, decision)
                self.quarantined.add(step)
                return
            self.loop.loaded(self.manager.load(self.loop.run, decision))
            self.after_load(step)

    def after_load(self, step):
        self.last_saved = self.descent = step
        self.stops = self.aborted = False  # this is another attempt
        assert self.step_now == step
        assert digest_of(self.loop.state) == self.contents[step]
        self.settle()
        self.hear()

    # --- the machine ---------------------------------------------------------------------------------------------

    @rule(keep_unsynced=st.booleans(), torn_write=st.booleans())
    def crash(self, keep_unsynced, torn_write):
        self.reboot(keep_unsynced=keep_unsynced, torn_write=torn_write)

    @rule(index=st.integers(0, 5))
    def damage(self, index):
        """Change a byte in a checkpoint that is not the last good one."""
        self.release_writer()
        good = [step for step in self.path if step not in self.damaged and step not in self.unsure]
        if len(good) < 2:
            return
        step = good[index % len(good)]
        named, prefix = self.store.manifest(step), f"{directory_of(step)}/"
        models = [name for name in sorted(self.store.names) if name.startswith(prefix + "model")]
        name = next(name for name in models if name.removeprefix(prefix).encode() in named)
        data = bytearray(self.store.content(name))
        data[-1] ^= 1
        fault, self.store.inner._fault = self.store.inner._fault, None
        self.store.put(name, bytes(data))
        self.store.inner._fault = fault
        self.damaged.add(step)

    # --- what holds ----------------------------------------------------------------------------------------------

    def found(self, step):
        """The digest of a checkpoint, or the error that it raises."""
        names = sorted(name for name in self.store.names if name.startswith(directory_of(step) + "/"))
        key = (step, hash(tuple((name, self.store.content(name)) for name in names)))
        if key not in self.looked:
            try:
                state = load(self.store, like=self.loop.state, step=step, components=COMPONENTS)
                self.looked[key] = digest_of(state)
            except CheckpointError as error:
                self.looked[key] = type(error).__name__
        return self.looked[key]

    @invariant()
    def a_machine_that_dies_boots_before_its_rule_ends(self):
        """Otherwise what dies is the law below, in this process."""
        assert not self.is_dead

    @invariant()
    def what_was_acknowledged_is_there_and_equal(self):
        """D05, E01, E02, E03: the store has exactly the checkpoints of the model, bit for bit."""
        assert self.store.complete() == set(self.contents)
        for step, digest in self.contents.items():
            assert self.found(step) == ("CheckpointDamaged" if step in self.damaged else digest), step

    @invariant()
    def the_newest_of_the_present_lineage_is_what_a_load_finds(self):
        """E16, P07: damaged checkpoints are skipped."""
        assert [entry.head.step for entry in lineage(read_inventory(self.store))] == self.path[::-1]
        good = [step for step in self.path if step not in self.damaged]
        if good:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointPassedOver)
                state = load(self.store, like=self.loop.state, components=COMPONENTS)
            assert (state.trainer.step, digest_of(state)) == (good[-1], self.contents[good[-1]])
        elif not self.contents:
            with pytest.raises(ResumeRefused):
                load(self.store, like=self.loop.state, components=COMPONENTS)

    @invariant()
    def what_is_in_quarantine_is_what_was_found_to_be_damaged(self):
        """P07: a checkpoint stays in quarantine until it is saved again."""
        assert set(quarantined(self.store)) == {directory_of(step) for step in self.quarantined}

    @invariant()
    def pointers_name_what_is_there(self):
        """E13: the pointers name complete checkpoints, and `latest` names the one that was written last."""
        if self.points_at is not None and self.save_ is None:
            assert self.store.point_target("latest") == self.points_at
        if self.save_ is None and self.store.point_target("latest") is not None:
            assert self.store.manifest(int(self.store.point_target("latest").removeprefix("step-")))
        if self.best_there is not None and self.best_perhaps is None:
            assert self.best_there in self.contents
        if self.store.point_target("best") is not None and self.save_ is None:
            assert self.store.manifest(int(self.store.point_target("best").removeprefix("step-")))

    def teardown(self):
        if hasattr(self, "manager"):
            self.store.gate.set()
            with suppress(BaseException):
                self.manager.close()


ManagerAndDisk.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Forgotten(set):
    """What a process that died has held: the next one, which this process plays too, does not know it."""

    def __contains__(self, token):
        return False


class ManagerAndBucket(ManagerAndDisk):
    """The same over a bucket: each request may fail, and a machine may die at it."""

    def new_store(self):
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(writer_lease, "is_dead", lambda pid, started: True)  # this process plays those that died
        self.patched.setattr(writer_lease, "_HELD", Forgotten())
        return GatedBucket(self.new_client())

    def new_client(self):
        """Of an empty bucket."""
        return ClientOfMemory()

    @rule(fault=st.sampled_from([None, ("crash", 0), ("error", 0)]))
    def renew(self, fault):
        """C03: the lease is renewed between two calls; a crash that a save has left armed may strike there too."""
        before = self.store.inner._fault, self.is_armed
        if not self.is_armed:
            self.arm(fault)
        self.store.renew()
        if not self.finished(None):
            self.store.inner._fault, self.is_armed = before

    def teardown(self):
        super().teardown()
        if hasattr(self, "patched"):
            self.patched.undo()


class ManagerAndS3(ManagerAndBucket):
    """The same on a server that speaks S3, over HTTP."""

    def new_client(self):
        return s3_cases.s3_client(servers(s3_cases.S3Server).port, bucket_cases.new_name())


class ManagerAndAzure(ManagerAndBucket):
    """The same on a server of Azure's blobs."""

    def new_client(self):
        return azure_cases.azure_client(servers(azure_cases.AzureServer).port, azure_cases.new_name())


class ManagerAndGcs(ManagerAndBucket):
    """The same at ``gs://``, over a translation of its interface that is our own."""

    def new_client(self):
        return servers(gcs_cases.Gcs).client(bucket_cases.new_name())


class ManagerAndFilesystem(ManagerAndBucket):
    """The same through a filesystem of fsspec, in memory."""

    def new_client(self):
        return FsspecPrefix(fsspec.filesystem("memory"), bucket_cases.new_name())


class ManagerAndS3Fs(ManagerAndBucket):
    """The same through s3fs, over HTTP."""

    library = "s3fs"

    def new_client(self):
        return filesystem_cases.client_at(self.library, servers(filesystem_cases.SERVERS[self.library]).port)


class ManagerAndGcsFs(ManagerAndS3Fs):
    """The same through gcsfs, on a server that speaks Google's JSON interface."""

    library = "gcsfs"


class ManagerAndAdlFs(ManagerAndS3Fs):
    """The same through adlfs."""

    library = "adlfs"


@cache
def servers(kind):
    """One of each kind for all examples, until Python ends."""
    server = kind()
    atexit.register(server.close)
    return server


LONG = [pytest.mark.timeout(0 if EXAMPLES > 14 else 900), pytest.mark.long]
LACKS = {
    ManagerAndBucket: "",
    ManagerAndS3: "",
    ManagerAndAzure: "" if azure_cases.PROGRAM else "needs azurite: `make buckets` installs it",
    ManagerAndGcs: "" if gcs_cases.PROGRAM else "needs fake-gcs-server: `make buckets` installs it",
    ManagerAndFilesystem: "",
    ManagerAndS3Fs: filesystem_cases.lacks("s3fs"),
    ManagerAndGcsFs: filesystem_cases.lacks("gcsfs"),
    ManagerAndAdlFs: filesystem_cases.lacks("adlfs"),
}
for each, lacks in LACKS.items():
    each.TestCase.settings = settings(ManagerAndDisk.TestCase.settings, max_examples=EXAMPLES)
    each.TestCase.pytestmark = [*LONG, pytest.mark.skipif(bool(lacks), reason=lacks)]
TestManagerAndBucket, TestManagerAndS3 = ManagerAndBucket.TestCase, ManagerAndS3.TestCase
TestManagerAndAzure, TestManagerAndGcs = ManagerAndAzure.TestCase, ManagerAndGcs.TestCase
TestManagerAndFilesystem, TestManagerAndS3Fs = ManagerAndFilesystem.TestCase, ManagerAndS3Fs.TestCase
TestManagerAndGcsFs, TestManagerAndAdlFs = ManagerAndGcsFs.TestCase, ManagerAndAdlFs.TestCase
TestManagerAndDisk = ManagerAndDisk.TestCase
TestManagerAndDisk.pytestmark = [pytest.mark.timeout(0 if EXAMPLES > 14 else 300), pytest.mark.slow(10)]

"""A manager over a disk that fails and crashes, beside a simple model: what it has promised, and what may be there besides.

The saver's thread is real. Between two rules it stands still: at a gate, with a save in its hands, or with nothing to do.
"""

import errno
import hashlib
import os
import threading
import warnings
from contextlib import suppress

import attrs
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

import trainfold
from trainfold.adapters.live.live import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked
from trainfold.backends.runs.api import load
from trainfold.backends.runs.best_file import BestIgnored, best_checkpoint, load_best, save_best
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.runs.quarantine_file import quarantined
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import CrashAt, Effect, ErrorAt, MemoryStore, SimulatedCrash
from trainfold.backends.worker_thread import Job
from trainfold.core import tree
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.errors import CheckpointError, ResumeRefused, SaveFailed
from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.resume.inventory import lineage
from trainfold.core.save.retention import keep_every
from trainfold.core.state.components import components_of
from trainfold.core.step.loss import Loss

EXAMPLES, STEPS = {"laws": (600, 40), "soak": (20_000, 60)}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), (30, 25))
COMPONENTS = ("model", "optimizer", "trainer")
PAUSE = threading.Event()  # who waits for it is in no kernel, which a save need not wait for
WANTED = make_best_record(metric="loss", direction="min")
SAVING = {"save", "stop", "save_and_stop"}
STOPPING = {"stop", "save_and_stop", "abort"}


# --- the program -----------------------------------------------------------------------------------------------------


class StateLoop:
    """A functional run, whose steps consume their input."""

    def __init__(self):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        sgd = trainfold.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.run = trainfold.init_state(model, sgd)
        self._step = trainfold.make_step(
            model, lambda model, batch: Loss(sum=model(batch).square().sum(), weight=len(batch)), sgd, donate=True
        )

    @property
    def state(self):
        return self.run

    def train(self, salt):
        self.run, _ = self._step(self.run, torch.full((2, 3), 0.1 + salt))

    def overwrite(self, salt):
        with torch.no_grad():
            for leaf in tree.leaves(self.run.model):
                leaf.add_(0.5 + salt)
        self.run = self.run.evolve(trainer=attrs.evolve(self.run.trainer, step=self.run.trainer.step + 1))

    def loaded(self, found):
        self.run = found


class LiveLoop:
    """A mutable run."""

    def __init__(self):
        torch.manual_seed(0)
        self._model = nn.Linear(3, 2)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self.run = attach(self._model, self._optimizer)

    @property
    def state(self):
        return self.run.capture()

    def train(self, salt):
        self._model(torch.full((2, 3), 0.1 + salt)).square().sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.run.advance(samples=2)

    def overwrite(self, salt):
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(0.5 + salt)
        self.run.advance(samples=2)

    def loaded(self, found):
        """It was written in place."""


def digest_of(state):
    """Of every bit; not by the library's own fingerprints."""
    whole = hashlib.blake2b(digest_size=8)
    for name, component in sorted(components_of(state).items()):
        if name in COMPONENTS:
            for path, leaf in tree.named_leaves(component, name):
                value = leaf.detach().numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode()
                whole.update(path.encode() + b"\0" + value)
    return whole.hexdigest()


# --- the disk --------------------------------------------------------------------------------------------------------


class GatedStore:
    """A disk whose writes wait while its gate is closed."""

    def __init__(self, inner):
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        self.is_waiting = not self.gate.is_set()
        self.gate.wait(20)
        self.is_waiting = False
        self.inner.write(name, parts, size_bytes=size_bytes)

    @property
    def files(self):
        return dict(self.inner._disk.files)

    def manifest(self, step):
        return self.inner._disk.files.get(f"{directory_of(step)}/{MANIFEST}")

    def complete(self):
        names = [name.split("/") for name in self.files if name.endswith("/" + MANIFEST)]
        return {int(directory.removeprefix("step-")) for directory, _ in names}

    def put(self, name, data):
        """Let a file be there, durably."""
        writer = self.inner._next_writer
        self.inner._next_writer += 1
        directory = name.rpartition("/")[0]
        for effect in (
            Effect("begin", name, writer=writer),
            Effect("part", name, data, writer),
            Effect("finish", name, writer=writer),
            Effect("sync", directory),
        ):
            self.inner._do(effect)

    def after_crash(self, **kinds):
        """What the next boot finds, as a disk that can crash again."""
        found = self.inner.after_crash(len(self.inner.effects), **kinds)._disk
        again = GatedStore(MemoryStore())
        for name, data in found.files.items():
            again.put(name, data)
        for name, target in found.hints.items():
            again.inner._do(Effect("point", name, target.encode()))
        return again


# --- the model -------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Save:
    """A save that was begun: what of, and what stood there before.

    Attributes:
        before: the manifest that it replaces, or None.
        landed: whether its own is there.
        in_place: whether it is of the same timeline as what stood there.
        old: what the model knew of that step and of the path, when it landed.
    """

    step: int
    digest: str
    before: bytes | None
    landed: bool = False
    in_place: bool = False
    old: tuple = ()


faults = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.sampled_from(["crash", "crash", "error", "full"]), st.integers(0, 24)),
)
requests = st.sampled_from(["save", "save", "stop", "save_and_stop", "abort"])
salts = st.integers(0, 3)
rarely = st.sampled_from([False, False, False, True])


class ManagerAndDisk(RuleBasedStateMachine):
    """The model: checkpoints by step, the path that led to now, and what a crash may change of both.

    Attributes:
        contents: step -> digest of every complete checkpoint.
        path: the steps of the present lineage, oldest first.
        descent: the step that was loaded, or saved and acknowledged, last; None in a process that has done neither.
        save: the save that is under way.
        unsure: saves that landed and were not acknowledged: a crash may take them back.
        undead: steps whose deletion was not acknowledged: a crash may bring them back.
        outside: those of them that a rewind has left behind meanwhile.
    """

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
        self.store = GatedStore(MemoryStore())
        self.contents, self.path, self.damaged, self.quarantined = {}, [], set(), set()
        self.unsure, self.undead, self.leaving, self.outside = {}, {}, {}, set()
        self.best, self.best_perhaps, self.points_at = None, None, None
        self.looked = {}
        self.is_armed = False
        self.open()

    def open(self):
        self.waiting, self.asked, self.source = set(), set(), Asked()
        self.last_saved, self.stops, self.aborted, self.descent = None, False, False, None
        self.save_, self.next, self.events, self.pruned = None, None, [], set()
        self.manager = CheckpointManager(
            self.store,
            every=self.every,
            keep_last=self.keep_last,
            keep=None if self.long_term is None else keep_every(self.long_term),
            mode=self.mode,
            max_extra_bytes=self.room,
            when_busy=self.when_busy,
            components=COMPONENTS,
            requests=self.source,
            on_event=self.events.append,
        )

    # --- what the model says -------------------------------------------------------------------------------------

    @property
    def step_now(self):
        return self.loop.state.trainer.step

    def prepare(self, fault):
        """Before a call that may begin a save."""
        step = self.step_now
        self.next = Save(step, digest_of(self.loop.state), self.store.manifest(step))
        self.arm(fault)

    def arm(self, fault):
        if fault is None:
            return
        kind, ahead = fault
        index = self.store.inner._attempts + ahead
        code = errno.ENOSPC if kind == "full" else errno.EIO
        self.store.inner._fault = CrashAt(index) if kind == "crash" else ErrorAt(index, code, lasting=kind == "full")
        self.is_armed = True

    def call(self, action):
        """Do something to the manager; what it returned, or raised."""
        told = len(self.events)
        try:
            value = action()
        except (SaveFailed, SimulatedCrash) as error:
            value = error
        assert self.is_armed or not isinstance(value, BaseException), f"failed without a fault: {value}"
        self.settle()
        failures = [event for event in self.events if event.kind == "failed"]
        committed = [event.step for event in self.events if event.kind == "committed"]
        if not isinstance(value, SimulatedCrash):
            assert bool(failures) == isinstance(value, SaveFailed), f"{value!r}: {self.events[told:]}"
        if committed and not self.is_armed and not self.store.is_waiting:
            self.check_no_litter(committed[-1])
        self.hear()
        return value

    def check_no_litter(self, committed):
        """E03: what earlier faults left of saves and deletions goes with what is old."""
        steps = {int(name.split("/")[0].removeprefix("step-")) for name in self.store.files if name.startswith("step-")}
        assert all(self.store.manifest(step) for step in steps if step < committed)

    def settle(self):
        """Wait until the thread stands still."""
        worker, last = self.manager._saves._saver._worker, Job(lambda: None)
        if worker._line is not None:
            worker.begin(last)
        while worker._line is not None and not (last.is_over or self.store.is_waiting):
            PAUSE.wait(0.0001)
        if self.save_ is not None:
            self.land(self.save_)

    def hear(self):
        """Compare the events with the model."""
        for event in self.events:
            if event.kind == "saved":
                assert self.save_ is None, "two at a time (D04)"
                assert self.mode == "async"
                self.save_, self.before, self.last_saved = self.next, self.last_saved, event.step
                self.next = None
            elif event.kind in {"committed", "failed"}:
                save, self.save_ = self.save_, None
                if save is None:
                    save, self.next = self.next, None
                assert save is not None, f"told twice: {event}"
                assert save.step == event.step
                self.land(save)
                (self.committed if event.kind == "committed" else self.failed)(save)
            elif event.kind == "pruned":
                self.pruned.add(event.checkpoint)
        self.events.clear()
        if self.save_ is not None and self.store.inner._crash is None:
            self.land(self.save_)
        self.bury()

    def land(self, save):
        """Notice that the manifest of a save is there."""
        if save.landed or self.store.manifest(save.step) == save.before:
            return
        step = save.step
        save.landed = True
        save.old = self.contents.get(step), tuple(self.path), self.damaged & {step}, frozenset(self.outside)
        save.in_place = self.path[-1:] == [step] and self.descent in {None, step}
        self.contents[step] = save.digest
        self.outside.discard(step)
        self.path = [*self.ancestors(step), step]
        self.damaged.discard(step)
        self.quarantined.discard(step)
        self.undead.pop(step, None)
        self.pruned.discard(directory_of(step))
        self.unsure[step] = save

    def ancestors(self, step):
        """Those of a state that is saved at a step: up to what it descends from, or, where nobody knows, all that are below."""
        newest, below = max(self.path, default=0), [older for older in self.path if older < step]
        if (newest if self.descent is None else max(newest, self.descent)) <= step and self.descent in {None, newest}:
            return below
        last = max(below, default=-1) if self.descent is None else self.descent
        self.outside |= {other for other in self.undead if other > last}
        return [older for older in below if older <= last]

    def committed(self, save):
        assert save.landed, f"step {save.step} was acknowledged and is not there"
        self.descent = save.step
        self.unsure.pop(save.step, None)
        if self.mode == "sync":
            self.last_saved = save.step
        self.points_at = None if self.is_armed else directory_of(save.step)
        for step in self.goes(save.step):
            self.leaving[step] = self.contents.pop(step)
            self.path.remove(step)

    def failed(self, save):
        assert self.is_armed
        self.points_at = None
        if self.mode == "async":
            self.last_saved = self.before

    def goes(self, written):
        """What retention deletes, oldest first: the rules, as a person would say them."""
        best = None if self.best is None else self.best[0]
        free = [step for step in self.path if step == written or step not in {best, *self.quarantined}]
        kept = {written, best, *self.quarantined}
        if self.keep_last:
            kept |= set(free[-self.keep_last :])
        if self.long_term:
            kept |= {next(s for s in free if s // self.long_term == step // self.long_term)
                     for step in free if step >= self.long_term}  # fmt: skip
        if not self.keep_last and not self.long_term:
            kept |= set(free)
        return [step for step in self.path if step not in kept]

    def bury(self):
        """Look what has become of those that were to be deleted."""
        pruned, there = self.pruned, self.store.complete()
        for step in sorted(self.leaving):
            digest = self.leaving.pop(step)
            if step in there:
                assert self.is_armed, f"step {step} should have been deleted"
                self.contents[step] = digest
                self.path = sorted([*self.path, step])
            elif self.is_armed and directory_of(step) not in pruned:
                self.undead[step] = digest
            self.unsure.pop(step, None)
            self.damaged -= set() if step in there else {step}
            self.quarantined -= set() if step in there else {step}
        present = {directory_of(step) for step in self.contents}
        assert not present & pruned, f"{present & pruned}: what is there was said to be deleted"
        if self.save_ is None:
            self.store.inner._fault, self.is_armed = (None, False) if not self.is_dead else (None, True)

    @property
    def is_dead(self):
        return self.store.inner._crash is not None

    def finished(self, value):
        """After each call: if the machine has died in it, boot."""
        if self.is_dead:
            self.reboot(keep_unsynced=True, torn_write=False)
            return True
        assert not isinstance(value, SimulatedCrash)
        return False

    def reboot(self, **kinds):
        """The machine dies, if it has not yet; a new process finds the disk."""
        self.is_armed = True
        self.store.inner._crash = self.store.inner._crash or SimulatedCrash("now")
        self.store.gate.set()
        with suppress(BaseException):
            self.manager.close()
        under_way = [save for save in (self.save_, self.next) if save is not None]
        self.save_ = self.next = None
        self.store = self.store.after_crash(**kinds)
        for save in under_way:
            self.points_at = None
            self.land(save)
        for step, save in list(self.unsure.items()):
            if self.store.manifest(step) == save.before:
                self.take_back(step, save)
        self.unsure.clear()
        there = self.store.complete()
        for step, digest in self.undead.items():
            if step in there and step not in self.contents:
                self.contents[step] = digest
                self.path = sorted({*self.path, step} - self.outside)
        self.undead.clear()
        self.outside.clear()
        self.bury()
        best = best_checkpoint(self.store)
        known = None if self.best is None else directory_of(self.best[0])
        assert best in {known, self.best_perhaps}
        self.best = None if best is None else (int(best.removeprefix("step-")), None)
        self.best_perhaps = None
        self.is_armed = False
        self.loop = type(self.loop)()
        self.open()
        self.recover()

    def take_back(self, step, save):
        digest, path, damaged, outside = save.old
        if self.path[-1:] == [step]:
            self.path = [older for older in path if older in self.contents]
            self.outside = set(outside)
        elif step in self.path and not save.in_place:
            self.path.remove(step)
        if digest is None:
            del self.contents[step]
        else:
            self.contents[step] = digest
        self.damaged |= damaged

    def recover(self):
        """A new process goes on without any help from the newest that there is."""
        if not self.manager.should_load(self.loop.run):
            assert not self.path
            return
        self.load_newest()

    # --- training ------------------------------------------------------------------------------------------------

    @rule(salt=salts, overwrites=st.booleans())
    def train(self, salt, overwrites):
        """D02: by a step, before which the manager is told; or by other writes, before which the loop tells it."""
        if self.room == 0:
            self.release_writer()  # else it waits for ever
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
        """The next save will stand before its first write."""
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
        """D02, D04: the loop updates everything, and is at the next boundary, while the writer stands still."""
        if not self.is_armed:
            self.save(trains=1, holds=True, fault=None)
            self.train(salt, overwrites=overwrites)
            self.step(trains=0, holds=False, asks=asks, is_last=False, is_best=False, fault=None)
            self.go_on()
            self.step(trains=0, holds=False, asks=None, is_last=False, is_best=False, fault=None)

    @rule(index=st.integers(0, 20), again=st.booleans())
    def fail_and_be_due_again(self, index, again):
        """D05, A14: a save that failed is no save: the same boundary saves."""
        if not self.is_armed:
            if again:
                self.save(trains=0, holds=False, fault=None)
                self.drain()
            self.save(trains=0 if again else 1, holds=False, fault=("error", index))
            self.poll()
            self.step(trains=0, holds=False, asks=None, is_last=True, is_best=False, fault=None)

    @rule(index=st.integers(0, 5), damages=st.booleans())
    def go_another_way(self, index, damages):
        """E16, P07: from an older one that was asked for, or that the newest left after it was damaged."""
        if not self.is_armed:
            for _ in range(2):
                self.save(trains=1, holds=False, fault=None)
            if damages:
                self.damage(index)
            self.load(None if damages else index)
            for _ in range(2):
                self.save(trains=1, holds=False, fault=None)

    def come(self, trains):
        """To the next boundary."""
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
        if saves and self.store.is_waiting and (stops or self.when_busy == "wait"):
            if self.when_busy == "skip" and not self.is_armed and fault is None and self.save_.step != self.step_now:
                threading.Timer(0.01, self.store.gate.set).start()  # what a run ends with waits, and is not skipped
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
        """Whether this boundary saves, and whether it stops."""
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
        """A14: whatever was saved before, the final state is saved once."""
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
        """D07: it drains, tells what nobody was told, and may be called again."""
        self.release_writer()
        value = self.call(self.manager.close)
        if self.finished(value):
            return
        assert self.save_ is None
        assert self.call(self.manager.close) is None
        self.open()
        self.manager._first.is_cleared = (
            True  # what is in memory is what the closed one has saved, or goes on from there
        )

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
            self.best, self.best_perhaps = (step, score), None
            assert self.is_armed or self.store.point_target("best") == directory_of(step)
        except (SaveFailed, SimulatedCrash) as error:
            if self.finished(error if self.is_dead else None):
                return
            if best_checkpoint(self.store) == directory_of(step):
                self.best = (step, score)
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
        """E16: what is saved after an older one was loaded begins a new timeline."""
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
        self.stops = self.aborted = False  # it is another try
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
        """A byte rots in a checkpoint that is not the last good one."""
        self.release_writer()
        good = [step for step in self.path if step not in self.damaged and step not in self.unsure]
        if len(good) < 2:
            return
        step = good[index % len(good)]
        named, prefix = self.store.manifest(step), f"{directory_of(step)}/"
        models = [name for name in sorted(self.store.files) if name.startswith(prefix + "model")]
        name = next(name for name in models if name.removeprefix(prefix).encode() in named)
        data = bytearray(self.store.files[name])
        data[-1] ^= 1
        fault, self.store.inner._fault = self.store.inner._fault, None
        self.store.put(name, bytes(data))
        self.store.inner._fault = fault
        self.damaged.add(step)

    # --- what holds ----------------------------------------------------------------------------------------------

    def found(self, step):
        """The digest of a checkpoint, or the error that it raises."""
        prefix = directory_of(step) + "/"
        key = (
            step,
            hash(tuple(sorted((name, data) for name, data in self.store.files.items() if name.startswith(prefix)))),
        )
        if key not in self.looked:
            try:
                state = load(self.store, like=self.loop.state, step=step, components=COMPONENTS)
                self.looked[key] = digest_of(state)
            except CheckpointError as error:
                self.looked[key] = type(error).__name__
        return self.looked[key]

    @invariant()
    def what_was_acknowledged_is_there_and_equal(self):
        """D05, E01, E02, E03: neither more nor less than the model says, each bit of it."""
        assert self.store.complete() == set(self.contents)
        for step, digest in self.contents.items():
            assert self.found(step) == ("CheckpointDamaged" if step in self.damaged else digest), step

    @invariant()
    def the_newest_of_the_present_lineage_is_what_a_load_finds(self):
        """E16, P07: what is damaged is passed over."""
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
        """P07: until it is saved again."""
        assert set(quarantined(self.store)) == {directory_of(step) for step in self.quarantined}

    @invariant()
    def pointers_name_what_is_there(self):
        """E13: the hints name complete checkpoints; `latest` the one that was written last."""
        if self.points_at is not None and self.save_ is None:
            assert self.store.point_target("latest") == self.points_at
        if self.save_ is None and self.store.point_target("latest") is not None:
            assert self.store.manifest(int(self.store.point_target("latest").removeprefix("step-")))
        if self.best is not None and self.best_perhaps is None:
            assert self.best[0] in self.contents
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
TestManagerAndDisk = ManagerAndDisk.TestCase
TestManagerAndDisk.pytestmark = [pytest.mark.timeout(0 if EXAMPLES > 30 else 300)]

"""The model of a manager over a disk that fails and crashes: two loops, a store with a gate, and the allowed contents."""

import errno
import hashlib
import json
import threading
from contextlib import suppress

import attrs
import torch
from torch import nn

import trainfold
from kit.backends.best_file_cases import best_name
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.requests.sources import Asked
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.stores.memory import CrashAt, Effect, ErrorAt, MemoryStore, SimulatedCrash
from trainfold.core import tree
from trainfold.core.best.record import make_best_record
from trainfold.core.errors import SaveFailed
from trainfold.core.format.file_names import MANIFEST, directory_of
from trainfold.core.save.retention import keep_every
from trainfold.core.state.components import components_of
from trainfold.core.step.loss import Loss

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
        assert self.gate.wait(250), "the loop waits for a save that it holds"
        self.is_waiting = False
        self.inner.write(name, parts, size_bytes=size_bytes)

    @property
    def names(self):
        return list(self.inner._disk.files)

    def content(self, name):
        """The bytes of a file; None if there is none."""
        return self.inner._disk.files.get(name)

    def manifest(self, step):
        return self.content(f"{directory_of(step)}/{MANIFEST}")

    def timeline(self, step):
        return json.loads(self.manifest(step))["timeline"]

    def complete(self):
        names = [name.split("/") for name in self.names if name.endswith("/" + MANIFEST)]
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


class DiskModel:
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

    def open(self):
        self.waiting, self.asked, self.answering, self.source = set(), set(), set(), Asked()
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
        self.pointed = self.store.point_target("best")
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
        steps = {int(name.split("/")[0].removeprefix("step-")) for name in self.store.names if name.startswith("step-")}
        assert all(self.store.manifest(step) for step in steps if step < committed)

    def settle(self):
        """Wait until the thread stands still."""
        saves = self.manager._saves
        jobs = [saves._deletions.last, None if saves._under_way is None else saves._under_way.job]
        while not (all(job is None or job.is_over for job in jobs) or self.store.is_waiting):
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
                self.answering = self.asked
                self.next = None
            elif event.kind in {"committed", "failed"}:
                save, self.save_ = self.save_, None
                if save is None:
                    save, self.next = self.next, None
                assert save is not None, f"reported twice: {event}"
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
        self.timelines[step] = self.store.timeline(step)
        self.outside.discard(step)
        self.path = [*self.ancestors(step), step]
        self.damaged.discard(step)
        self.quarantined.discard(step)
        self.undead.pop(step, None)
        self.pruned.discard(directory_of(step))
        self.unsure[step] = save

    def ancestors(self, step):
        """The ancestors of a state saved at a step: up to its parent, or all steps below if the parent is not known."""
        newest, below = max(self.path, default=0), [older for older in self.path if older < step]
        if (newest if self.descent is None else max(newest, self.descent)) <= step and self.descent in {None, newest}:
            return below
        last = max(below, default=-1) if self.descent is None else self.descent
        self.outside |= {other for other in self.undead if other > last}
        return [older for older in below if older <= last]

    def committed(self, save):
        self.answering = set()
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
        self.asked, self.answering = (
            self.asked | self.answering,
            set(),
        )  # a request is answered when its save is durable
        self.points_at = None
        if self.mode == "async":
            self.last_saved = self.before

    def goes(self, written):
        """The checkpoints that retention deletes, oldest first: its rules in a few lines.

        A pointer keeps its target (E02): after a `save_best` that failed, it may still lead to the former best, and if the best was
        trained again by a save that died, the next save moves the pointer away, and the one after that deletes.
        """
        pointed = {self.store.point_target("best")}
        if self.best is not None and self.best_there is None:
            pointed |= {self.pointed} & {directory_of(self.best[0])}
        stays = {self.best_there, *self.quarantined, *(step for step in self.path if directory_of(step) in pointed)}
        free = [step for step in self.path if step == written or step not in stays]
        kept = {written, *stays}
        if self.keep_last:
            kept |= set(free[-self.keep_last :])
        if self.long_term:
            kept |= {next(s for s in free if s // self.long_term == step // self.long_term)
                     for step in free if step >= self.long_term}  # fmt: skip
        if not self.keep_last and not self.long_term:
            kept |= set(free)
        return [step for step in self.path if step not in kept]

    @property
    def best_there(self):
        """The step of the best; None if that step was trained again after a rewind: then it is another state."""
        if self.best is None:
            return None
        step, _, timeline = self.best
        return step if self.timelines[step] == timeline else None

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
        best = best_name(self.store)
        known = None if self.best is None else directory_of(self.best[0])
        assert best in {known, self.best_perhaps}
        self.best = None if best is None else (int(best.removeprefix("step-")), None, read_best(self.store).timeline)
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
            self.timelines[step] = self.store.timeline(step)
        self.damaged |= damaged

    def recover(self):
        """A new process goes on without any help from the newest that there is."""
        if not self.manager.should_load(self.loop.run):
            assert not self.path
            return
        self.load_newest()

"""Recorded operations of a run on its disk: saves, re-saves, rewinds, retention, pointers. Each is a list of effects."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias, final
from unittest import mock

import attrs
import torch
from torch import nn

import trainfold
from crash.disk.disk import Disk
from crash.disk.effects import Effect, Recorder
from crash.disk.extents import Extents, in_extents
from crash.disk.frozen_store import files_in, materialise
from crash.disk.states import after_all, live
from crash.disk.syscalls import Handler, watched
from trainfold.adapters.cli.prune import Keep, prune_run
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.runs.quarantine_file import begin_attempt, end_attempt
from trainfold.backends.runs.reuse import unchanged
from trainfold.backends.stores import direct_io
from trainfold.backends.stores.local import LocalStore
from trainfold.core import tree
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.format.file_names import directory_of
from trainfold.core.history.quarantine import LIMIT, LoadOutcome
from trainfold.core.state.components import components_of
from trainfold.core.state.state import TrainState

Make: TypeAlias = Callable[[int, int], TrainState]  # the state of a step and a variant
SHM: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None


@final
@attrs.frozen
class Doing:
    """An operation of a program: its ``begin`` mark says that it starts, its ``ack`` mark that it has returned.

    Attributes:
        step: the step of the save.
        digest: the digest of the saved state, or of the state that is loaded after one attempt too many.
        gone: checkpoints that may be deleted once the save is durable, and are deleted when it returns.
        best: the score, if the operation writes one.
        attempts: the number of load attempts, if the operation records one.
    """

    step: int
    digest: str = ""
    gone: tuple[str, ...] = ()
    best: float | None = None
    attempts: int | None = None


def state_at(step: int, variant: int = 0) -> TrainState:
    """A state whose tensors go into three files, of several blocks, two blocks and one; different for each step and variant."""
    generator = torch.Generator().manual_seed(1000 * step + variant)
    state = _template()

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator)
        return leaf

    model = tree.unflatten(
        tree.structure(state.model), [fresh(leaf) for _, leaf in tree.named_leaves(state.model, "m")]
    )
    trainer = attrs.evolve(state.trainer, step=step, samples=8 * step)
    extra = {"ema": torch.randn(300, generator=generator), "queue": torch.randint(99, (9,), generator=generator)}
    return state.evolve(model=model, trainer=trainer, extra=extra)


@cache
def _template() -> TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24))
    state = trainfold.init_state(model, trainfold.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
    return state.evolve(extra={"ema": torch.zeros(300), "queue": torch.zeros(9, dtype=torch.int64)})


def digest_of_state(state: TrainState) -> str:
    """A digest of every leaf of a state, independent of the library's own fingerprints."""
    whole = hashlib.blake2b(digest_size=16)
    for name, component in sorted(components_of(state).items()):
        for path, leaf in tree.named_leaves(component, name):
            is_tensor = isinstance(leaf, torch.Tensor)
            value = leaf.detach().contiguous().view(torch.uint8).numpy().tobytes() if is_tensor else repr(leaf).encode()
            whole.update(f"{path} {type(leaf).__name__} {tuple(leaf.shape) if is_tensor else ''}\0".encode() + value)
    return whole.hexdigest()


# --- what is recorded ------------------------------------------------------------------------------------------------


@final
class Scene:
    """A recorder with the operations of a run."""

    def __init__(self, recorder: Recorder, make: "Make | None" = None) -> None:
        self.recorder = recorder
        self.make = make or state_at
        self.run = str(Path(recorder.top) / "run")

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        self.recorder.mark("begin", what)
        yield
        self.recorder.mark("ack", what)

    def save(self, step: int, variant: int = 0) -> None:
        state = self.make(step, variant)
        with self.doing(Doing(step, digest_of_state(state))):
            trainfold.save(state, self.run)

    def best(self, step: int, score: float, run: Any = None) -> None:
        record = updated(make_best_record(metric="loss", direction="min"), {"loss": score}, step=step)
        with self.doing(Doing(step, best=score)):
            save_best(self.run if run is None else run, record)


def first_save(scene: Scene) -> None:
    scene.save(1)


def second_save(scene: Scene) -> None:
    scene.save(1)
    scene.save(2)


def save_again(scene: Scene) -> None:
    """A step is saved three times."""
    for variant in range(3):
        scene.save(1, variant)


def rewind(scene: Scene) -> None:
    """Steps below the newest are saved on a new timeline: first one that replaces a checkpoint, then one that is new."""
    for step, variant in ((2, 0), (6, 0), (2, 1), (4, 1)):
        scene.save(step, variant)


def prune(scene: Scene) -> None:
    """A manager keeps the last two of five."""
    with trainfold.CheckpointManager(scene.run, keep_last=2, mode="sync") as manager:
        for step in range(1, 6):
            state = state_at(step)
            gone = (directory_of(step - 2),) if step > 2 else ()
            with scene.doing(Doing(step, digest_of_state(state), gone)):
                manager.save(state)


def pointers(scene: Scene) -> None:
    """The best is written and moved between saves."""
    scene.save(1)
    scene.best(1, 3.0)
    scene.save(2)
    scene.best(2, 2.0)


def background(scene: Scene) -> None:
    """A manager writes in a thread and keeps two; a save is acknowledged when the manager reports that it has ended."""
    with trainfold.CheckpointManager(scene.run, keep_last=2, mode="async") as manager:
        for step in range(1, 5):
            state = state_at(step)
            gone = (directory_of(step - 2),) if step > 2 else ()
            with scene.doing(Doing(step, digest_of_state(state), gone)):
                manager.save(state)
                manager.drain()


def quarantine(scene: Scene) -> None:
    """Load attempts are recorded before a load and removed after it; then one checkpoint has too many, and another has wrong bytes.

    A resume then loads an older one; saving the step again takes it out of quarantine.
    """
    older, store = digest_of_state(state_at(1)), LocalStore(scene.run)
    scene.save(1)
    scene.save(2)

    def attempt(attempts: int, digest: str = "") -> None:
        with scene.doing(Doing(2, digest, attempts=attempts)):
            begin_attempt(store, directory_of(2))

    attempt(1)
    with scene.doing(Doing(2, attempts=0)):
        end_attempt(store, directory_of(2))
    attempt(1)
    attempt(2)
    attempt(LIMIT, older)
    scene.save(3)
    with scene.doing(Doing(3, older, attempts=LIMIT + 1)):
        end_attempt(store, directory_of(3), LoadOutcome("damaged", "its digest is another one"))
    scene.save(3, variant=1)


def long_life(scene: Scene) -> None:
    """Everything with one manager that keeps one checkpoint: a best that stays, a rewind, a step saved twice."""
    store = LocalStore(scene.run)
    with trainfold.CheckpointManager(store, keep_last=1, mode="sync") as manager:

        def save(step: int, variant: int = 0, *gone: int) -> None:
            state = state_at(step, variant)
            with scene.doing(Doing(step, digest_of_state(state), tuple(map(directory_of, gone)))):
                manager.save(state)

        save(2)
        scene.best(2, 2.0, store)
        save(4)
        save(6, 0, 4)
        save(3, 1)
        save(3, 2)


def two_ranks(scene: Scene, steps: Iterable[int] = (1, 2)) -> None:
    """Two ranks save twice, each its share of the files; the threads decide which effect comes first."""
    for step in steps:
        state = scene.make(step, 0)
        with scene.doing(Doing(step, digest_of_state(state))):
            run_threads(2, lambda ranks, state=state: trainfold.save(state, scene.run, collectives=ranks))


def direct(scene: Scene) -> None:
    """Like two saves of large states: allocated ahead, written around the page cache by two threads, cut to size."""
    pool = type(direct_io._POOL)()  # small buffers, since the usual ones are kept for other saves
    with mock.patch.multiple(direct_io, DIRECT_FROM_BYTES=1, BUFFER_BYTES=8192, _POOL=pool):
        second_save(scene)


def _partly(step: int, model: int, ema: int) -> TrainState:
    """The state of a step with the model and the EMA of other steps."""
    state = state_at(step)
    return state.evolve(model=state_at(model).model, extra={**state.extra, "ema": state_at(ema).extra["ema"]})


@contextmanager
def _referring(run: str, **options: Any) -> Iterator[trainfold.CheckpointManager]:
    """A manager whose saves refer to what the EMA and the weights of the model held before; biases are too small."""
    with (
        mock.patch.object(unchanged, "LEAST_BYTES", 1000),
        trainfold.CheckpointManager(run, reuse_unchanged=True, **options) as manager,
    ):
        yield manager


def references(scene: Scene) -> None:
    """A manager keeps one, and what it refers to; in the end both go, first the one that refers."""
    with _referring(scene.run, keep_last=1) as manager:
        for step, model, ema, gone in ((1, 1, 1, ()), (2, 1, 2, ()), (3, 3, 3, (1, 2))):
            state = _partly(step, model, ema)
            with scene.doing(Doing(step, digest_of_state(state), tuple(map(directory_of, gone)))):
                manager.save(state)


def references_rewound(scene: Scene) -> None:
    """A step is saved again by a later timeline, while another checkpoint refers to its files."""
    with _referring(scene.run) as manager:
        for step, model, ema in ((1, 1, 1), (2, 1, 2), (1, 8, 8)):
            state = _partly(step, model, ema)
            with scene.doing(Doing(step, digest_of_state(state))):
                manager.save(state)


def flatten(scene: Scene) -> None:
    """A checkpoint that refers to the one before is written again without references, and the other one goes."""
    with _referring(scene.run) as manager:
        for step, model in ((1, 1), (2, 1)):
            state = _partly(step, model, step)
            with scene.doing(Doing(step, digest_of_state(state))):
                manager.save(state)
    with scene.doing(Doing(2, digest_of_state(_partly(2, 1, 2)), (directory_of(1),))):
        prune_run(Path(scene.run), Keep(last=1), dry_run=False, flatten=True)


SCENARIOS: Final[dict[str, Callable[[Scene], None]]] = {
    each.__name__: each
    for each in (
        first_save,
        second_save,
        save_again,
        rewind,
        prune,
        pointers,
        background,
        quarantine,
        long_life,
        two_ranks,
        direct,
        references,
        references_rewound,
        flatten,
    )
}


def record(
    scenario: Callable[[Scene], None],
    disk: Disk | None = None,
    *,
    make: Make | None = None,
    mutant: Callable[[Recorder], Handler] | None = None,
) -> list[Effect]:
    """Run a scenario in a new directory with the files of a disk; return its effects, with large writes merged into few extents.

    It also checks that the recorder missed nothing: its effects must lead to the files that exist in the end.

    Args:
        scenario: the operations.
        disk: the disk at the start.
        make: makes the state of a step and variant; None for `state_at`.
        mutant: changes the calls before they are made and recorded.
    """
    disk = disk or Disk()
    files, inodes = live(disk)
    with TemporaryDirectory(dir=SHM) as top:
        materialise(files, top)
        recorder = Recorder(top, inodes, max(disk.kinds))
        with watched(recorder if mutant is None else mutant(recorder)):
            scenario(Scene(recorder, make))
        effects = in_extents(recorder.effects)
        found = live(after_all(effects, disk))[0]
        assert {path: bytes(data) if isinstance(data, Extents) else data for path, data in found.items()} == files_in(
            top
        )
    return effects

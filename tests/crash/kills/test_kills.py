"""Real kills: SIGKILL ends a training program at any moment, the program is started again until it is done, and nothing is lost."""

import warnings
from pathlib import Path
from random import Random

import attrs
import pytest

from crash.effort import IS_SOAK
from crash.kills.lives import STEPS, WANTED, Job, Kill, Life, Lives, best_of_all, digest, litter
from trainfold.backends.runs.api import load
from trainfold.backends.runs.best.best_file import load_best
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.file_names import MANIFEST
from trainfold.core.history.inventory import lineage

KILLS = 250 if IS_SOAK else 8  # of each mode
SEED = 0


@pytest.fixture(scope="module")
def lives(warm_python):
    """The server of lives."""
    server = Lives(warm_python)
    yield server
    server.close()


@pytest.fixture(scope="module")
def reference(lives, tmp_path_factory):
    """The states of a run that was not killed: step -> digest."""
    code, lines = lives.live(Life(str(tmp_path_factory.mktemp("whole") / "run"), "sync", tells_states=True))
    assert code == 0, lines
    words = [line.split(" ", 2) for line in lines]
    states = {int(step): digest for word, step, digest in (one for one in words if one[0] == "state")}
    assert len(states) == STEPS + 1
    return states


@pytest.fixture(scope="module")
def template():
    """A state to load into."""
    return Job().live.capture()


@attrs.define
class Reported:
    """What the program has reported: what it has promised, and what may exist beside that.

    Attributes:
        newest: the step that was reported last as committed.
        perhaps: the steps whose save may have started since.
        best: the step that was reported last as the best.
        best_perhaps: the steps that were about to become the best since.
        is_rewound: whether the run has restarted from an older step since.
    """

    newest: int | None = None
    perhaps: set[int] = attrs.field(factory=set)
    best: int | None = None
    best_perhaps: set[int] = attrs.field(factory=set)
    is_rewound: bool = False

    def hear(self, lines):
        for line in lines:
            word, *rest = line.split()
            if word == "at":
                self.perhaps.add(int(rest[0]))
            elif word == "committed":
                self.newest = int(rest[0])
                self.perhaps = {step for step in self.perhaps if step > self.newest}
            elif word == "best?":
                self.best_perhaps.add(int(rest[0]))
            elif word == "best":
                self.best, self.best_perhaps, self.is_rewound = int(rest[0]), set(), False
            elif word == "began":
                self.is_rewound |= int(rest[0]) < (self.newest or 0)
            assert word != "litter" or rest == ["0"], "a new manager left what a dead one was writing"
            assert word not in {"failed", "refused", "error"}, lines


def check(run, reported, reference, template):
    """Check that a program would now find what was promised or something newer, and that it is whole."""
    store = LocalStore(run)
    found = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # only a save that a kill interrupted is skipped
        warnings.filterwarnings("ignore", "CheckpointTorn: .*: a save that did not finish")
        if reported.newest is not None or (run / "latest").is_symlink():
            state = load(store, like=template)
            found = state.trainer.step
            assert digest(state) == reference[found]
        assert found in {reported.newest, *reported.perhaps}
        for entry in lineage(read_inventory(store)):
            state = load(store, like=template, step=entry.head.step)
            assert digest(state) == reference[entry.head.step]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rewind may have left it behind
        best = load_best(store, WANTED)
    assert best.step in {reported.best, *reported.best_perhaps} or (best.step is None and reported.is_rewound)
    if best.step is not None:
        assert digest(load(store, like=template, step=best.step)) == reference[best.step]
    # a save that the kill interrupted
    torn = [path for path in run.glob("step-*") if not (path / MANIFEST).exists()]
    return bool(torn or any(litter(str(run))))


def plan(random, mode, *, began):
    """How a life starts, and when it ends."""
    begins = random.choice(["on", "on", "again", "rewind"])
    if mode == "sync":
        kinds = [Kill("at", random.randrange(2, 14), is_watched=True, delay_secs=random.uniform(0.0, 0.01))] * 2
    else:
        kinds = [Kill("saved", random.randrange(1, 5), is_watched=True, delay_secs=random.uniform(0.0, 0.01))] * 2
    kinds += [Kill("began", delay_secs=random.uniform(0.0, 0.1)), Kill("best?", delay_secs=random.uniform(0.0, 0.005))]
    if began:  # a checkpoint would be quarantined if three processes died while loading it (P07)
        kinds.append(Kill("litter", delay_secs=random.uniform(0.0, 0.02)))
    return begins, random.choice(kinds)


@pytest.mark.timeout(0 if IS_SOAK else 120)
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_killed_again_and_again_a_run_ends_with_the_bits_of_one_that_was_not(
    mode, lives, reference, template, tmp_path, record_property
):
    """C02, P07: whenever SIGKILL comes, a committed checkpoint is found, is whole, and needs no manual repair.

    The program is killed while loading, while saving (its writer is a thread), during retention and while naming the best. It
    may start by saving its checkpoint again, or by a rewind. In the end it is not killed any more, and another run starts as
    long as kills are left.
    """
    random, kills, torn, number = Random(f"{SEED} {mode}"), 0, 0, 0
    while kills < KILLS:
        run: Path = tmp_path / f"run-{number}"
        number += 1
        reported, began, code = Reported(), True, -9
        while code != 0:
            begins, kill = plan(random, mode, began=began) if kills < KILLS else ("on", None)
            code, lines = lives.live(Life(str(run), mode, begins, kill))
            reported.hear(lines)
            began = any(line.startswith("began") for line in lines)
            assert code in {0, -9}, lines
            if code != 0:
                kills += 1
                torn += check(run, reported, reference, template)
        assert lines[-1] == f"done {reference[STEPS]}"
        check(run, reported, reference, template)
        assert lineage(read_inventory(LocalStore(run)))[0].head.step == STEPS
        best = load_best(LocalStore(run), WANTED)
        assert (best.step, best.score) == best_of_all()
        assert not list(litter(str(run)))
    record_property("torn", torn)
    assert torn >= kills // 5, "the kills miss the saves"

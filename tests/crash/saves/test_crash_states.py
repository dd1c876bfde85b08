"""After any crash during a save, a re-save, a rewind, retention or a pointer update, what was acknowledged is found, whole."""

import pytest

from crash.disk.disk import Disk
from crash.disk.effects import TOP, Bind
from crash.disk.frozen_store import FrozenStore, materialise, visible
from crash.disk.states import Budget, crash_states
from crash.effort import BUDGET, CRASH_AGAIN_EVERY, GO_ON_SHARE, IS_SOAK, places, say
from crash.saves.recovery import Examiner, Promised, crash_again, kill_then_crash, look, promises
from crash.saves.scenarios import SCENARIOS, SHM, record
from trainfold.backends.stores.local import LocalStore

# The minimum number of distinct states, in the usual run and in the soak; the soak has more than a hundred thousand in all.
FEWEST = {
    "first_save": (120, 3_000),
    "second_save": (250, 15_000),
    "save_again": (300, 18_000),
    "rewind": (300, 50_000),
    "prune": (300, 50_000),
    "pointers": (300, 9_000),
    "background": (300, 50_000),
    "quarantine": (300, 30_000),
    "long_life": (300, 60_000),  # naming a best syncs the named checkpoint, so a crash can lose less
    "two_ranks": (300, 40_000),
    "direct": (250, 18_000),
    "references": (250, 30_000),
    "references_rewound": (300, 40_000),
    "flatten": (300, 40_000),
}


LONG = {"references_rewound"}  # as `rewind` and `save_again`, with files that another checkpoint needs


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SCENARIOS]
)
def scene(request):
    """The name and the effects of a scenario, recorded once."""
    return request.param, record(SCENARIOS[request.param])


@pytest.mark.slow(2)
@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_whatever_a_crash_leaves_what_was_acknowledged_is_found_and_whole(scene, record_property):
    """C01, C02, C05, E03, E16: no state leads to a torn checkpoint being loaded or an acknowledged one being lost.

    In a share of the states a program continues: taking the lock removes all staged files, and the next save is found.
    """
    name, effects = scene
    promised, examiner, seen = promises(effects), Examiner(go_on_share=GO_ON_SHARE), set()
    for state in crash_states(effects, BUDGET, places=places(effects)):
        seen.add(state.key())
        wrong = examiner.wrong(state, promised[state.done])
        assert not wrong, f"{name}, after {effects[: state.done][-1:]}: {state}\n" + "\n".join(wrong)
    for what, count in (("states", len(seen)), ("views", examiner.looked), ("went on", examiner.went_on)):
        record_property(what, count)
    say(f"{name}: {len(effects)} effects, {len(seen)} distinct states, {examiner.looked} views of the run, "
          f"a program went on from {examiner.went_on}")  # fmt: skip
    assert len(seen) >= FEWEST[name][IS_SOAK]
    assert examiner.went_on


def test_far_more_than_a_hundred_thousand_states_are_looked_at_in_the_soak():
    """Nearly all states: in most scenarios, every legal subset after every effect."""
    assert set(FEWEST) == set(SCENARIOS)
    assert sum(soak for _, soak in FEWEST.values()) > 250_000


@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_a_crash_while_a_run_goes_on_after_a_crash_loses_nothing_either(scene):
    """After the first crash, all that it left is durable, including staged files and half-written steps."""
    name, effects = scene
    promised, examiner = promises(effects), Examiner(go_on_share=0)
    states = crash_states(effects, Budget(16, 2), places=places(effects))
    new = [state for state in states if examiner.is_new(state, promised[state.done])]
    total = 0
    for state in new[:: max(1, CRASH_AGAIN_EVERY)]:
        count, wrong = crash_again(state, promised[state.done], examiner, Budget(128, 8) if IS_SOAK else Budget(4, 2))
        assert not wrong, f"{name}, after {effects[: state.done][-1:]}: {state}\n" + "\n".join(wrong)
        total += count
    say(f"{name}: {total} states after a second crash")
    assert total


@pytest.mark.timeout(0 if IS_SOAK else 120)
def test_a_power_cut_after_another_process_has_gone_on_from_a_killed_one_loses_nothing(scene):
    """The second process finds names and bytes that were never made durable, and must sync them before it relies on them.

    This excludes a run that was created just before; see the test below.
    """
    name, effects = scene
    promised, examiner, disk, total = promises(effects), Examiner(go_on_share=0), Disk(), 0
    for done in range(len(effects) + 1):
        if done % (1 if IS_SOAK else 70) == 0:
            count, wrong = kill_then_crash(disk, promised[done], examiner, Budget(64, 4) if IS_SOAK else Budget(4, 2))
            assert not wrong, f"{name}, killed after {effects[:done][-1:]}\n" + "\n".join(wrong)
            total += count
        disk = disk if done == len(effects) else disk.after(effects[done])
    say(f"{name}: {total} states after a kill and a power cut")
    assert total


def test_a_run_whose_directory_somebody_else_has_made_is_durable_when_a_save_returns():
    """C02: if a user or a killed process made the directory, a crash could otherwise take away the run with all its saves."""
    made = Bind(TOP, "run", 1, "directory")
    count, wrong = kill_then_crash(Disk().after(made), Promised(), Examiner(go_on_share=0), Budget(16, 2))
    assert not wrong, wrong
    assert count


def test_a_run_in_memory_is_read_as_the_same_run_on_a_disk(scene, tmp_path):
    """The checks in memory are therefore valid for `LocalStore`."""
    name, effects = scene
    every = list(crash_states(effects, Budget(8, 2), places=places(effects)))
    for number, state in enumerate(every[:: len(every) // (12 if IS_SOAK else 4) + 1]):
        top = tmp_path / str(number)
        top.mkdir()
        materialise(state.files, top)
        there, here = look(LocalStore(top / "run")), look(FrozenStore(visible(state.files)))
        assert (there.newest, there.whole, there.best, len(there.wrong)) == (here.newest, here.whole, here.best, 0), (
            name
        )
        assert SHM is None or not here.wrong

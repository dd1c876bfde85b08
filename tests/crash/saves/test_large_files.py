"""Files above 1, 8 and 32 MiB, buffered and direct, from one writer and two: after any crash, what was acknowledged is whole."""

import pytest

from crash.disk.effects import Write
from crash.disk.states import Budget, crash_states
from crash.effort import GO_ON_SHARE, IS_SOAK, places, say
from crash.saves.large import LARGE, MIB, MORE
from crash.saves.recovery import Examiner, promises

MOST_EXTENTS = 12  # the two threads of two ranks interleave in any order; with one rank it is 4
BUDGET = Budget(512, 64) if IS_SOAK else Budget(8, 4)


@pytest.mark.timeout(0 if IS_SOAK else 120)
@pytest.mark.parametrize("large", [*LARGE, *MORE] if IS_SOAK else LARGE, ids=str)
def test_whatever_a_crash_leaves_of_large_files_what_was_acknowledged_is_found_and_whole(large):
    """W18, C01, C02: the number of states does not grow with the file size, because a file is a few extents between two syncs."""
    effects = large.record()
    written = {}
    for effect in effects:
        if isinstance(effect, Write):
            written.setdefault(effect.inode, []).append(len(effect.data))
    extents = [len(sizes) for sizes in written.values() if sum(sizes) > large.size_mib * MIB]
    assert len(extents) == large.saves * large.writers
    assert max(extents) <= MOST_EXTENTS
    promised = promises(effects)
    examiner, seen = Examiner(go_on_share=GO_ON_SHARE / 4, make=large.make), set()
    for state in crash_states(effects, BUDGET, places=places(effects)):
        seen.add(state.key())
        wrong = examiner.wrong(state, promised[state.done])
        assert not wrong, f"{large}, after {effects[: state.done][-1:]}: {state}\n" + "\n".join(wrong)
    say(f"{large}: {len(effects)} effects, {len(seen)} distinct states, {examiner.looked} views of the run")
    assert len(seen) >= 100 * large.saves

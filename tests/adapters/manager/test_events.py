"""Events of a run, and logs keyed by its steps: each step appears once, also after a crash and after a rewind."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.best.best_file import save_best
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.best.record import make_best_record, updated

EVERY = 2
# how many steps, and which checkpoint it goes back to; only a save makes what was left behind void, so there is one
LEGS = st.tuples(st.integers(0, 5), st.none()) | st.tuples(st.integers(EVERY, 5), st.integers(0, 9))


def new_run():
    model = torch.nn.Linear(1, 1)
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("mode", ["sync", "async"])
@given(legs=st.lists(LEGS, min_size=1, max_size=5))
def test_a_log_that_is_cut_where_the_run_resumes_has_each_step_once(mode, legs):
    """R04: whatever was not saved, and whichever step it resumes from; a commit is reported with its own step."""
    store, log, committed = MemoryStore(), [], []

    def listen(event):
        if event.kind == "committed":
            committed.append(event.step)

    for steps, rewind in legs:
        back_to = None if rewind is None or not committed else committed[rewind % len(committed)]
        live = new_run()
        with CheckpointManager(store, mode=mode, every=EVERY, at_end=False, on_event=listen) as manager:
            start = manager.restore(live, step=back_to).step
            log = [step for step in log if step <= start]
            committed[:] = [step for step in committed if step <= start]
            for _ in range(steps):
                live.advance(samples=1)
                manager.step(live)
                log.append(live.progress.step)
    assert log == list(range(1, live.progress.step + 1))
    assert committed == list(range(EVERY, live.progress.step + 1, EVERY))


def test_the_weights_of_the_best_are_told_apart_from_a_resume():
    """R04: a log that is cut by events must not lose the entries after the best step."""
    store, events, live = MemoryStore(), [], new_run()
    with CheckpointManager(store, every=1, on_event=events.append) as manager:
        for _ in range(2):
            live.advance(samples=1)
            manager.step(live)
        save_best(store, updated(make_best_record(metric="loss", direction="min"), {"loss": 1.0}, step=1))
        events.clear()
        manager.load_best(live)
    assert [(event.kind, event.step) for event in events] == [("restored_best", 1)]
    assert live.progress.step == 2

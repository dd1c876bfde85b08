"""Helpers shared by the tests of best file."""

import pytest

from trainfold.backends.runs.api import save
from trainfold.backends.runs.best.best_reader import read_best
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.best.record import make_best_record, updated
from trainfold.core.state.state import Progress, TrainState

WANTED = make_best_record(metric="loss", direction="min")


LIKE = TrainState(trainer=Progress())


def save_at(run, *steps):
    for step in steps:
        save(TrainState(trainer=Progress(step=step)), run)


def won(score, step, record=WANTED):
    return updated(record, {"loss": score}, step=step)


def best_names(store):
    """The checkpoints that the run's best.json keeps -> why, the best one first."""
    file = read_best(store)
    return {} if file is None else file.names


def best_name(store):
    """The checkpoint of the best; None without one."""
    return next(iter(best_names(store)), None)


def best_scores(store):
    """(checkpoint, timeline) -> score."""
    file = read_best(store)
    return {} if file is None else file.scores


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "run")


# --- restarts --------------------------------------------------------------------------------------------------------

"""What was acknowledged is there: after a death at any request of a save, and through a network that fails all the time."""

import warnings

import fsspec
import pytest
import torch
from kit.backends.buckets.bucket_cases import check_no_loss, new_name
from kit.backends.buckets.s3_cases import store_at
from obstore.store import MemoryStore

import trainfold
from trainfold.backends.runs.load import CheckpointPassedOver
from trainfold.backends.stores.object_store import writer_lease
from trainfold.backends.stores.object_store.bucket import calls_of
from trainfold.backends.stores.object_store.object_store import ObjectStore
from trainfold.backends.stores.object_store.over_fsspec.calls import FsspecPrefix
from trainfold.core.errors import TrainfoldError
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Progress, TrainState

Panic = type(
    "PanicException", (BaseException,), {"__module__": "pyo3_runtime"}
)  # as obstore raises it; it can be imported from nowhere
LONG = pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])


class Dying:
    """The calls of a store, of which all fail from one on: the machine is gone. That one may have been carried out."""

    def __init__(self, calls, left, *, is_done, failure=None):
        self.calls, self.left, self.is_done, self.exceptions = calls, left, is_done, calls.exceptions
        self.failure = failure or calls.exceptions.GenericError

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                if self.left == -1 and self.is_done:
                    getattr(self.calls, name)(*args, **kwargs)
                raise self.failure("the machine is gone")
            return getattr(self.calls, name)(*args, **kwargs)

        return call


def state_at(step, salt=0):
    model = ModelState(Leaves({"w": torch.full((4,), float(step + 1000 * salt))}), Leaves())
    return TrainState(model=model, trainer=Progress(step=step))


def value_of(state):
    """The step, and the number that is in all of the model."""
    (value,) = set(state.model.params["w"].tolist())
    return state.trainer.step, value


def loaded(store):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)
        return trainfold.load(store, like=state_at(0))


@pytest.mark.parametrize(
    "new_client",
    [
        pytest.param(MemoryStore, id="obstore"),
        pytest.param(
            lambda: FsspecPrefix(fsspec.filesystem("memory"), new_name()), id="fsspec", marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.parametrize(
    ("step", "is_done", "failure"),
    [
        pytest.param(2, True, None, id="another step, carried out"),
        pytest.param(1, False, None, id="the step again, not carried out"),
        pytest.param(2, False, None, id="another step, not carried out", marks=pytest.mark.long),
        pytest.param(1, True, None, id="the step again, carried out", marks=pytest.mark.long),
        pytest.param(2, True, Panic, id="answers that the client cannot take"),
    ],
)
def test_a_death_at_any_request_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    step, is_done, failure, new_client, monkeypatch
):
    """E01, E02: and the next writer takes over and saves, as after the death of a process."""
    monkeypatch.setattr(writer_lease, "is_dead", lambda pid, started: True)
    old, new = state_at(1), state_at(step, salt=1)
    died, at = True, 0
    while died:
        client = new_client()
        trainfold.save(old, ObjectStore(client, url="memory://run"))
        dying = ObjectStore(client, url="memory://run")
        dying._bucket._api = Dying(calls_of(client), at, is_done=is_done, failure=failure)
        try:
            trainfold.save(new, dying)
            died = dying._bucket._api.left < 0
            is_acknowledged = True
        except TrainfoldError:
            is_acknowledged = False
        found = value_of(loaded(ObjectStore(client, url="memory://run")))
        assert found in ({value_of(new)} if is_acknowledged else {value_of(old), value_of(new)}), at
        after = ObjectStore(client, url="memory://run")
        trainfold.save(state_at(step, salt=2), after)
        assert value_of(trainfold.load(after, like=old, step=step)) == value_of(state_at(step, salt=2))
        at += 1
    assert at > 12


def test_a_read_goes_on_after_an_answer_that_the_client_cannot_take():
    """C03: as after one that breaks off."""
    store, panics = ObjectStore(MemoryStore(), url="memory://run"), [True]
    trainfold.save(state_at(1), store)
    real = store._bucket._api.get

    class Odd:
        def __init__(self, found):
            self.found = found

        def stream(self, **how):
            if panics and panics.pop():
                raise Panic("an answer")
            return self.found.stream(**how)

        def __getattr__(self, name):
            return getattr(self.found, name)

    calls = Dying(store._bucket._api, 1 << 30, is_done=True)
    calls.get = lambda *args, **kwargs: Odd(real(*args, **kwargs))
    store._bucket._api = calls
    assert value_of(trainfold.load(store, like=state_at(0))) == value_of(state_at(1))
    assert not panics


@pytest.mark.parametrize("faults", [30, LONG])
@pytest.mark.slow(3)
def test_nothing_that_a_manager_acknowledged_is_lost_in_many_faults(faults, proxy):
    """C03, E01: saves, retention and resumes through a network of which every fourth request fails in one of nine ways."""
    run = new_name()
    check_no_loss(lambda: store_at(proxy.port, run=run), proxy, faults)

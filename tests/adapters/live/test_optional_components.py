"""B07: an optional component that fails is named and left out; any other failure fails the save or the load on all ranks."""

import warnings

import pytest
import torch

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    CaptureRefused,
    InvalidArgument,
    OptionalLeftOut,
    RankFailed,
    ResumeRefused,
    TrainfoldError,
)


class Dashboard:
    """An object beside the training that may fail."""

    def __init__(self, value=0.0, *, saves="whole"):
        self.value, self.saves, self.takes = torch.tensor(value), saves, True

    def state_dict(self):
        if self.saves == "raises":
            raise ConnectionError("no route to the dashboard")
        return {"value": self.value.clone()} if self.saves == "whole" else {"value": object()}

    def load_state_dict(self, state):
        if not self.takes:
            raise ConnectionError("no route to the dashboard")
        self.value = state["value"].clone()


def build(dashboard, *, optional=("dashboard",)):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return attach(model, extra={"dashboard": dashboard}, optional=optional)


def saved(dashboard, store, *, collectives=None, mode="sync", **options):
    live = build(dashboard, **options)
    live.advance(samples=1)
    with CheckpointManager(store, mode=mode, collectives=collectives, start_over=True) as manager:
        manager.save(live)
        manager.drain()


def names_in(store):
    return {name.partition("-")[0] for name in store.list("step-00000001")}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("saves", ["raises", "an object"])
def test_an_optional_component_that_cannot_be_saved_is_named_and_absent(saves, mode):
    store = MemoryStore()
    with pytest.warns(OptionalLeftOut, match="the optional component dashboard is left out: it cannot be saved"):
        saved(Dashboard(saves=saves), store, mode=mode)
    assert "model" in names_in(store)
    assert "dashboard" not in names_in(store)
    live = build(Dashboard(5.0))
    with (
        CheckpointManager(store) as manager,
        pytest.warns(OptionalLeftOut, match="cannot be restored: .*saved nothing"),
    ):
        assert manager.restore(live).step == 1


@pytest.mark.parametrize("saves", ["raises", "an object"])
def test_one_that_is_not_optional_fails_the_save(saves):
    with pytest.raises(CaptureRefused, match="dashboard"):
        saved(Dashboard(saves=saves), MemoryStore(), optional=())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_that_fails_after_the_first_step_is_named_too(mode):
    """B07: the save raised a bare ConnectionError, which could be of any object, and of the store."""
    live = build(dashboard := Dashboard(), optional=())
    live.advance(samples=1)
    dashboard.saves = "raises"
    with CheckpointManager(MemoryStore(), mode=mode) as manager:
        with pytest.raises(ConnectionError, match="no route") as caught:
            manager.save(live)
        assert "'dashboard' was captured" in "".join(caught.value.__notes__)
        with pytest.raises(ConnectionError, match="no route") as caught:
            live.capture()
        assert "'dashboard' was captured" in "".join(caught.value.__notes__)


def test_what_works_is_saved_and_restored_as_ever():
    store = MemoryStore()
    saved(Dashboard(3.0), store)
    live = build(dashboard := Dashboard())
    with CheckpointManager(store) as manager:
        manager.restore(live)
    assert dashboard.value == 3.0


def test_one_that_does_not_take_its_state_goes_on_as_it_is():
    store = MemoryStore()
    saved(Dashboard(3.0), store)
    live = build(dashboard := Dashboard())
    dashboard.takes = False  # after the attach, so that it does not count as a changed setting
    with CheckpointManager(store) as manager, pytest.warns(OptionalLeftOut, match="ConnectionError"):
        assert manager.restore(live).step == 1
    assert dashboard.value == 0.0
    live = build(needed := Dashboard(), optional=())
    needed.takes = False
    with CheckpointManager(store) as manager, pytest.raises(TrainfoldError, match="ConnectionError"):
        manager.restore(live)


def test_a_module_of_another_shape_is_left_out_if_it_is_the_only_reason():
    """If there is another reason, the restore is refused, with all reasons."""
    store = MemoryStore()

    def run(size, width=1):
        return attach(torch.nn.Linear(1, width), extra={"log": torch.nn.Linear(1, size)}, optional=["log"])

    live = run(2)
    live.advance(samples=1)
    with CheckpointManager(store) as manager:
        manager.save(live)
    with CheckpointManager(store) as manager:
        with pytest.warns(OptionalLeftOut, match="log is left out"):
            manager.restore(run(3))
        with pytest.raises(ResumeRefused, match=r"(?s)model\.params.*log|log.*model\.params"):
            manager.restore(run(3, width=2))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_optional_module_that_cannot_be_saved_is_absent_too(mode):
    """B07: other code reads a module than an object with a state_dict, but it is left out in the same way."""
    store, log = MemoryStore(), torch.nn.Linear(1, 1)
    log.register_buffer("index", torch.eye(2).to_sparse())
    live = attach(torch.nn.Linear(1, 1), extra={"log": log}, optional=["log"])
    with pytest.warns(OptionalLeftOut, match="log is left out: it cannot be saved"):
        assert "log" not in live.capture().extra
    live.advance(samples=1)
    with CheckpointManager(store, mode=mode) as manager:
        with pytest.warns(OptionalLeftOut, match="log is left out"):
            manager.save(live)
        manager.drain()
    assert {"model", "log"} & names_in(store) == {"model"}


def test_one_that_fails_on_one_rank_is_absent_for_all():
    """The checkpoint must not claim that all ranks saved it."""
    store = MemoryStore()

    def work(world, optional):
        saved(Dashboard(saves="raises" if world.rank else "whole"), store, collectives=world, optional=optional)

    with pytest.warns(OptionalLeftOut, match="dashboard"):
        run_threads(2, lambda world: work(world, ["dashboard"]))
    assert "dashboard" not in names_in(store)
    first, other = (outcome.error for outcome in thread_outcomes(2, lambda world: work(world, ())))
    assert isinstance(other, CaptureRefused)
    assert first is None or isinstance(first, RankFailed)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("saves", ["whole", "raises"])
def test_one_that_is_not_selected_is_listed_as_omitted_and_nothing_is_warned(saves, ranks):
    """B03, B07: it failed, and was not listed; on two ranks it was said not to exist. One that is selected and fails is not omitted on purpose."""
    store = MemoryStore()

    def work(world, components):
        live = build(Dashboard(saves=saves))
        live.advance(samples=1)
        with CheckpointManager(store, components=components, collectives=world, start_over=True) as manager:
            manager.save(live)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_threads(ranks, lambda world: work(world, ["model", "trainer"]))
    assert read_manifest(store, "step-00000001").omitted == ("rng", "dashboard")
    if saves == "raises":
        with pytest.warns(OptionalLeftOut, match="dashboard"):
            run_threads(ranks, lambda world: work(world, None))
        assert read_manifest(store, "step-00000001").omitted == ()


def test_what_trains_is_never_optional():
    with pytest.raises(InvalidArgument, match=r"attach\.optional: expected names under extra=.*found \['model'\]"):
        build(Dashboard(), optional=["model"])

"""`attach(components=...)`: which components of a run its checkpoints have, said once, for every door that saves or restores it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.live.live_cases import Averaged
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, RestoreRefused, UnknownComponent
from trainfold.weights import ByScript, CheckpointWeights, Frozen

BUILT_IN = ["model", "optimizer", "scheduler", "trainer", "dataset", "rng"]
HERE = ["model", "optimizer", "scheduler", "trainer", "rng", "average"]


def built(components, *, seed=0, weights=None, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return attach(
        model, optimizer, scheduler=scheduler, extra={"average": Averaged()}, components=components, weights=weights, **more
    )  # fmt: skip


def saved(live, store, **manager):
    with CheckpointManager(store, **manager) as each:
        each.restore(live)
        live.advance(samples=1)
        return read_manifest(store, each.save(live).result.checkpoint)


def test_a_name_that_no_component_has_is_refused_where_the_run_is_attached():
    """B02: with the known names and the nearest; a known name that this run does not produce is ignored."""
    with pytest.raises(
        UnknownComponent, match=r"attach.components: .*'rng', 'average'\].*found \['averag'\].*'average'"
    ):
        built(["model", "averag"])
    live = built(["model", "optimizer", "scheduler", "trainer", "dataset"])  # there is no loader
    assert {each.name for each in saved(live, MemoryStore()).components} == {
        "model",
        "optimizer",
        "scheduler",
        "trainer",
    }


@settings(deadline=None, max_examples=25)
@given(mine=st.none() | st.sets(st.sampled_from(HERE)), theirs=st.none() | st.sets(st.sampled_from(BUILT_IN)))
def test_a_checkpoint_has_what_both_the_run_and_its_manager_select(mine, theirs):
    """B01: what is not selected is listed as omitted; a manager that asks for more than the run has declared is refused."""
    mine, theirs = (
        None if each is None else sorted(each | {"model", "optimizer", "scheduler", "trainer"})
        for each in (mine, theirs)
    )
    live, store = built(mine), MemoryStore()
    beyond = set(HERE) & set(theirs or ()) - set(HERE if mine is None else mine)
    if beyond:
        with pytest.raises(
            InvalidArgument, match=r"CheckpointManager.components: .*attach\(..., components="
        ) as caught:
            saved(live, store, components=theirs)
        assert caught.value.found == sorted(beyond)
        return
    manifest = saved(live, store, components=theirs)
    wanted = set(HERE) & (set(HERE) if mine is None else set(mine)) & (set(HERE) if theirs is None else set(theirs))
    assert {each.name for each in manifest.components} == wanted
    assert set(manifest.omitted) == set(HERE) - wanted
    again = built(mine, seed=1)
    with CheckpointManager(store, components=theirs) as manager:
        assert manager.restore(again).step == 1


def test_a_restore_leaves_alone_what_the_run_has_not_selected():
    """B01: also without a manager, where no call names components."""
    state = built(None).capture()
    live = built(["model", "trainer", "rng"], seed=1)
    live._objects.extra["average"].seen = 5
    with torch.no_grad():
        state.model.params["0.weight"].fill_(3)
    live.restore(state)
    assert live.capture().extra["average"].value["seen"] == 5
    assert live.capture().model.params["0.weight"].unique().tolist() == [3]
    with pytest.raises(InvalidArgument, match=r"Live.restore.components.*'average'"):
        live.restore(state, components=["average"])


@pytest.mark.parametrize(("names", "said"), [(["model", "optimizer", "trainer"], "expected scheduler with optimizer"),
                                             (["model", "scheduler", "trainer"], "expected optimizer with scheduler")])  # fmt: skip
def test_what_belongs_together_is_asked_for_where_the_run_is_attached(names, said):
    """B04."""
    with pytest.raises(InvalidArgument, match=f"attach.components: {said}"):
        built(names)


def test_leaving_out_the_model_is_the_mode_of_weights_from_outside_and_needs_their_source_at_once():
    """B03, J02: when it is configured; a source of the frozen part alone is not one for what is trained."""
    names = ["optimizer", "scheduler", "trainer", "rng"]
    with pytest.raises(InvalidArgument, match=r"attach.components: .*a source of its weights"):
        built(names)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    with pytest.raises(InvalidArgument, match=r"attach.components: .*Frozen"):
        attach(model, components=["trainer"], weights=Frozen(ByScript()))
    manifest = saved(built(names, weights=ByScript()), MemoryStore())
    assert manifest.omitted[0] == "model"
    export = saved(built(["average"]), MemoryStore(), every=5)
    assert [each.name for each in export.components] == ["average"]


def test_a_manager_that_leaves_out_the_model_of_a_run_needs_a_source_before_it_trains():
    """J02: by each call that looks for a checkpoint; with a source of the frozen part alone the trained part would be in no checkpoint."""
    names = ["optimizer", "scheduler", "trainer", "rng"]
    for call in ("restore", "should_load", "load"):
        with CheckpointManager(MemoryStore(), components=names) as manager:
            live = built(None)
            live.advance(samples=1)
            with pytest.raises(InvalidArgument, match=r"CheckpointManager.components: .*a source of its weights"):
                getattr(manager, call)(live)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    base = MemoryStore()
    saved(attach(model), base)
    live = attach(model, weights=Frozen(CheckpointWeights(base)))
    with (
        CheckpointManager(MemoryStore(), components=["trainer", "rng"]) as manager,
        pytest.raises(InvalidArgument, match=r"the frozen parameters alone"),
    ):
        manager.restore(live)


def test_a_run_that_has_selected_its_components_refuses_one_that_is_registered_later():
    """`attach` could not know its name, so it would be in no checkpoint."""
    live = attach(nn.Linear(1, 1), components=["model", "trainer"])
    with pytest.raises(
        InvalidArgument, match=r"register.name: .*\['model', 'trainer'\].*select components in the manager"
    ):
        live.register("meter", Averaged())
    assert "meter" not in live.present


def test_a_checkpoint_that_lacks_a_selected_component_is_named():
    """B07: whatever fails has the name of its component."""
    state = built(None).capture().evolve(rng=None)
    with pytest.raises(RestoreRefused, match="rng: expected a component that this run has"):
        built(["model", "rng"]).restore(state)

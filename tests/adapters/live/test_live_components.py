"""Components of a live run: refusals list every reason, pending components, open windows."""

import copy
import gc
import weakref

import pytest
import torch
from kit.adapters.live.live_cases import BATCH, SAMPLES, Averaged, Job, bits, differing
from torch import nn
from torch.utils.data import DataLoader

from trainfold.adapters.components.component import copied
from trainfold.adapters.components.optimizer import _device_of
from trainfold.adapters.live.attach import attach
from trainfold.adapters.live.live import Live
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    IncompleteWindow,
    InvalidArgument,
    InvalidState,
    RestoreRefused,
    SpecMismatch,
    UnknownComponent,
)
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import Opaque, Progress


class OneMore(nn.Module):
    """A module whose state is not a tensor."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_state_of_modules_travels_apart_from_the_weights():
    """B18 (one process): get_extra_state is a component of its own."""
    model, other = nn.Sequential(nn.Linear(1, 1), OneMore()), nn.Sequential(nn.Linear(1, 1), OneMore())
    model[1].scale = 0.25
    attach(other).restore(attach(model).capture())
    assert other[1].scale == 0.25


# --- refusals --------------------------------------------------------------------------------------------------------


def test_every_reason_is_listed_at_once_and_nothing_is_changed():
    """V12, V10: a failed restore leaves the live state unchanged."""
    good = Job(0).run(3).live.capture()
    params = dict(good.model.params)
    params["head.weight"] = torch.zeros(1, 9)
    params["embed.weight"] = params["embed.weight"].double()
    params["ghost"] = params.pop("head.bias")
    rng = copy.deepcopy(good.rng.value)
    del rng["numpy"]
    bad = good.evolve(
        model=type(good.model)(Leaves(params), good.model.buffers, good.model.ties),
        trainer=Progress(step=-1),
        scheduler=Opaque({"strange": 1}),
        rng=Opaque(rng),
        extra={"ema": good.extra["ema"]},
    )
    job = Job(1).run(2)
    before = copied(job.live.capture())
    with pytest.raises(RestoreRefused) as caught:
        job.live.restore(bad)
    text = str(caught.value)
    for part in (
        "head.weight",
        "embed.weight",
        "ghost",
        "head.bias",
        "trainer.step",
        "scheduler",
        "rng['numpy']",
        "average",
    ):
        assert part in text
    assert any(isinstance(reason, SpecMismatch) for reason in caught.value.reasons)
    assert differing(job.live.capture(), before) == []
    went_on = copied(job.run(4).live.capture())
    assert differing(went_on, Job(1).run(4).live.capture()) == []


class Refuses(Averaged):
    """Changes itself, and then raises."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.seen == 3:
            raise RuntimeError("not today")


def test_an_object_that_refuses_halfway_takes_everything_back():
    """V12: an object's own load_state_dict can fail at any moment, also after other objects have loaded their states."""
    job = Job(1)
    extra = {"first": Averaged(), "stubborn": Refuses(), "last": Averaged()}
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra=extra)
    theirs = Job(0).run(3).live.capture()
    state = theirs.evolve(extra=dict.fromkeys(extra, theirs.extra["average"]))
    before = copied(live.capture())
    with pytest.raises(RestoreRefused, match="not today"):
        live.restore(state)
    assert differing(live.capture(), before) == []


def test_a_step_counter_goes_where_torch_keeps_it():
    """B09: on the CPU, unless the kernels read it."""
    parameter = torch.empty(2, device="meta")
    assert _device_of("step", parameter, {"fused": None, "capturable": False}).type == "cpu"
    assert _device_of("step", parameter, {"fused": True}).type == "meta"
    assert _device_of("step", parameter, {"capturable": True}).type == "meta"
    assert _device_of("exp_avg", parameter, {}).type == "meta"


def test_a_missing_component_is_an_error_unless_it_is_left_out_by_name():
    """H04, B02: a missing random state is never silent; leaving it out is spelled out."""
    state = Job(0).run(2).live.capture().evolve(rng=None)
    job = Job(1)
    with pytest.raises(RestoreRefused, match="rng"):
        job.live.restore(state)
    before = torch.get_rng_state()
    job.live.restore(state, components=["model", "optimizer", "scheduler", "trainer", "dataset", "ema", "average"])
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(UnknownComponent, match="weights"):
        job.live.restore(state, components=["weights"])


def test_a_scheduler_without_its_optimizer_and_a_position_without_its_counters_are_refused():
    """B04, G10."""
    state = Job(0).run(2).live.capture()
    with pytest.raises(RestoreRefused, match="the learning rate that a scheduler has set"):
        Job(1).live.restore(state, components=["model", "scheduler", "trainer"])
    with pytest.raises(RestoreRefused, match="a position belongs to a run"):
        Job(1).live.restore(state, components=["model", "dataset"])
    with pytest.raises(RestoreRefused, match="expected scheduler with optimizer"):
        Job(1).live.restore(state, components=["model", "optimizer", "trainer"])
    job = Job(1)
    with (
        CheckpointManager(MemoryStore(), components=["optimizer", "trainer"]) as manager,
        pytest.raises(InvalidArgument, match="expected scheduler with optimizer"),
    ):
        manager.restore(job.live)


def test_the_model_alone_can_be_restored_and_the_rest_stays():
    """T45: a restore makes no slots in an optimizer that it does not restore, and counts no step."""
    state = Job(0).run(3).live.capture()
    job = Job(1)
    job.live.restore(state, components=["model"])
    assert torch.equal(job.model.head.weight, state.model.params["head.weight"])
    assert job.live.progress == Progress()
    assert job.optimizer.state == {}


def test_the_state_of_another_optimizer_is_refused():
    with pytest.raises(RestoreRefused, match=r"torch\.optim\.adamw\.AdamW.*torch\.optim\.sgd\.SGD|SGD.*AdamW"):
        Job(0).live.restore(Job(1, optimizer=torch.optim.SGD).live.capture())


@pytest.mark.parametrize("target", [object(), 3, (1, 2)])
def test_an_object_without_a_state_cannot_be_attached(target):
    with pytest.raises(InvalidArgument, match=r"extra\['thing'\]"):
        attach(nn.Linear(1, 1), extra={"thing": target})


def test_a_name_that_cannot_be_a_component_is_refused():
    with pytest.raises(InvalidArgument, match="optimizer"):
        attach(nn.Linear(1, 1), extra={"optimizer": Averaged()})


# --- later registration ----------------------------------------------------------------------------------------------


def test_a_component_registered_after_the_restore_gets_its_state(caplog):
    """B15, F47: by stable name; leftover states are reported."""
    state = Job(0).run(3).live.capture()
    job = Job(1)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra={"ema": job.ema})
    live.restore(state)
    assert live.pending == ("average",)
    assert "average" in caplog.text
    late = Averaged()
    live.register("average", late)
    assert live.pending == ()
    assert late.seen == 3
    assert torch.equal(late.value, state.extra["average"].value["value"])
    with pytest.raises(InvalidArgument, match="new name"):
        live.register("average", Averaged())


def test_a_component_that_nothing_is_registered_for_yet_is_saved_through():
    """B15: every state captured before `register` contains the pending component unchanged."""
    state = copied(Job(0).run(3).live.capture())
    expected = bits(state)
    job = Job(1)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra={"ema": job.ema})
    live.restore(state)
    state.extra["average"].value["value"].fill_(7)  # the caller goes on with its own
    state.extra["average"].value["seen"] = 7
    assert bits(live.capture()) == expected
    live.restore(copied(live.capture()), components=["model"])
    assert bits(live.capture()) == expected
    once_more = Job(2)
    once_more.live.restore(live.capture())
    assert once_more.average.seen == 3


def test_a_component_that_is_still_pending_outlives_the_checkpoints_before_it():
    """B15, E01: retention deletes the checkpoint that it came from."""
    store = MemoryStore()
    with CheckpointManager(store, keep_last=1) as manager:
        manager.save(Job(0).run(3).live)
    job = Job(1)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler, loader=job.loader, extra={"average": job.average})
    with CheckpointManager(store, keep_last=1) as manager:
        manager.restore(live)
        for x, _y in live.batches(steps=4):
            live.advance(samples=len(x))
        manager.save(live)
    whole = Job(2)
    with CheckpointManager(store) as manager:
        assert manager.restore(whole.live).step == 4
    assert torch.equal(whole.ema.module.head.weight, Job(0).run(3).ema.module.head.weight)


def test_a_component_that_is_still_pending_does_not_keep_a_run_from_an_earlier_checkpoint():
    """B15: nothing in the run requests it, so a checkpoint without it, or with another one, is whole."""

    def build(**extra):
        model = nn.Linear(1, 1)
        return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), extra=extra)

    with CheckpointManager(MemoryStore()) as manager:
        for step, extra in enumerate(({}, {"ema": nn.Linear(1, 2)}, {"ema": nn.Linear(1, 3)}), 1):
            live = build(**extra)
            live.advance(samples=1, steps=step)
            manager.save(live)
        live = build()
        pending = [(manager.restore(live, step=step).step, live.pending) for step in (3, 2, 1)]
    assert pending == [(3, ("ema",)), (2, ("ema",)), (1, ())]


def test_a_component_that_this_run_has_no_object_for_is_ignored_and_said_so(caplog):
    """B02, F55: a known component that this run does not produce, such as the position of a loop without a loader; its counters are restored all the same."""
    state = Job(0).run(3).live.capture()
    job = Job(1)
    live = attach(job.model, extra={"ema": job.ema, "average": job.average})
    live.restore(state)
    assert live.pending == ()
    assert "'dataset'" in caplog.text
    assert live.progress.step == 3


def test_a_tree_behind_two_functions_is_a_component():
    held = {"box": {"best": 0.5, "history": [1, 2]}}
    live = attach(nn.Linear(1, 1), extra={"notes": (lambda: held["box"], lambda value: held.update(box=value))})
    state = copied(live.capture())
    held["box"] = {"best": 0.1, "history": []}
    live.restore(state)
    assert held["box"] == {"best": 0.5, "history": [1, 2]}


# --- boundaries ------------------------------------------------------------------------------------------------------


def one_backward(job):
    x, y = next(iter(job.live.batches()))
    ((job.model(x) - y) ** 2).mean().backward()


def test_a_batch_handed_out_and_not_counted_is_an_open_window():
    """A06."""
    job = Job(0)
    next(job.live.batches())
    with pytest.raises(IncompleteWindow, match="batches handed out"):
        job.live.capture()


def test_gradients_of_half_a_window_are_seen():
    """A06."""
    job = Job(0)
    live = attach(job.model, job.optimizer, scheduler=job.scheduler)
    job.model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(IncompleteWindow, match="gradients"):
        live.capture()
    job.optimizer.step()
    with pytest.raises(IncompleteWindow, match="optimizer steps"):
        live.capture()
    live.advance(samples=4)
    live.capture()  # gradients are left, as before a zero_grad at the top of a loop
    job.optimizer.zero_grad(set_to_none=False)
    live.capture()  # zeros do not count as a gradient
    job.model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(IncompleteWindow, match="gradients"):
        live.capture()


def test_a_window_that_was_declared_open_is_open():
    """A06: advance(steps=0) inside the window; the boundary closes it."""
    live = Job(0).live
    batches = live.batches()
    x, _ = next(batches)
    live.advance(samples=len(x), steps=0)
    assert live.is_in_window
    with pytest.raises(IncompleteWindow, match="4 samples"):
        live.capture()
    x, _ = next(batches)
    assert live.advance(samples=len(x)) == Progress(step=1, samples=8)
    live.capture()


def test_a_window_left_open_by_the_end_of_the_data_is_given_up_whole():
    """A07: nothing partial is committed, no gradient leaks into the next window, and the samples count as consumed."""
    job = Job(0)
    for _x, _y in job.live.batches(epochs=1):
        pass
    job.model(torch.ones(4, 5)).sum().backward()
    with pytest.raises(IncompleteWindow):
        job.live.capture()
    assert job.live.drop_window() == Progress(step=0, epoch=1, samples=SAMPLES)
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert job.live.capture().dataset.value["epoch"] == 1


def test_accumulation_over_the_end_of_an_epoch_resumes_exactly():
    """A07, A08: a window of four batches spans two epochs of six."""

    def run(job, until):
        window = []
        for batch in job.live.batches(steps=until):
            window.append(batch)
            if len(window) < 4:
                continue
            job.optimizer.zero_grad()
            for x, y in window:
                ((job.model(x) - y) ** 2).mean().backward()
            job.optimizer.step()
            job.scheduler.step()
            job.live.advance(samples=sum(len(x) for x, _ in window))
            window = []
        return job

    whole, half = copied(run(Job(0), 5).live.capture()), copied(run(Job(0), 2).live.capture())
    resumed = Job(7)
    resumed.live.restore(half)
    assert differing(run(resumed, 5).live.capture(), whole) == []


def test_a_finished_run_draws_nothing_when_it_is_started_again():
    """A11: not even an iterator is made."""
    job = Job(0).run(6)
    again = Job(0)
    again.live.restore(job.live.capture())
    streams = torch.get_rng_state()
    assert list(again.live.batches(steps=6)) == []
    assert list(again.live.batches(epochs=1)) == []
    assert torch.equal(streams, torch.get_rng_state())


@pytest.mark.parametrize("counts", [{"samples": -1}, {"steps": -1}, {"tokens": 1.5}, {"steps": True}])
def test_counters_only_go_up(counts):
    with pytest.raises(InvalidArgument, match="advance"):
        attach(nn.Linear(1, 1)).advance(**counts)


def test_the_contract_names_what_must_be_equal_and_leaves_out_what_moves():
    """V08: batch size, dataset, scheduler; the learning rate is the scheduler's."""
    contract = Job(0).live.contract()
    assert contract["batch_size"] == BATCH
    assert contract["dataset_size"] == SAMPLES
    assert contract["scheduler.kind"] == ["torch.optim.lr_scheduler.LambdaLR"]
    assert contract["optimizer.groups['embed.weight'].lr"] == "live"
    assert Job(0).run(3).live.contract() == contract


def test_an_optimizer_does_not_keep_a_run_alive():
    import gc
    import weakref

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = attach(model, optimizer)
    gone = weakref.ref(live._watch.window)
    del live
    gc.collect()
    assert gone() is None
    optimizer.step()


def test_live_is_what_attach_returns():
    assert isinstance(attach(nn.Linear(1, 1)), Live)


def test_a_model_whose_shapes_are_not_known_yet_is_refused_with_what_to_do():
    """V12: before anything is read."""
    with pytest.raises(InvalidState, match=r"0\.weight.*run the model once"):
        attach(torch.nn.Sequential(torch.nn.LazyLinear(3)))
    with pytest.raises(InvalidState, match="meta device"):
        attach(torch.nn.Linear(2, 2, device="meta"))


class Answering(torch.nn.Linear):
    """A module that lists its own parameters: one that is not registered is added, and a registered one is hidden."""

    def __init__(self):
        super().__init__(2, 1)
        self.held = [torch.nn.Parameter(torch.full((3,), 7.0))]

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        yield "weight", self.weight
        yield "held", self.held[0]


def test_a_module_that_answers_for_its_parameters_is_asked():
    """B17: parameters that it names are saved, and parameters that it hides are not."""
    model = Answering()
    live = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(live.capture().model.params) == ["weight", "held"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_with_its_last_reference_and_its_loaders_workers_with_it(tmp_path, workers):
    """G06: a run in a reference cycle would keep workers and their pipes until a later garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
        live = attach(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1), loader=loader)
        with CheckpointManager(tmp_path / "run", every=1) as manager:
            manager.restore(live)
            for batch in live.batches(steps=2):
                live.advance(samples=len(batch))
                manager.step(live)
            live.restore(live.capture())
        held = [weakref.ref(live), weakref.ref(live._feed), weakref.ref(loader if workers else live)]
        del live, manager, loader
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()

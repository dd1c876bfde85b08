"""Stages of a pipeline are attached as `PipelineStage` objects; the ranks save one model. Here ranks are threads, and stages only say where they are."""

import copy
import logging
import os
import warnings

import pytest
import torch
from kit.adapters.live.live_cases import Limit
from kit.pipeline_stage import Stage
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim.swa_utils import AveragedModel

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import InjectedFailure, RankFault, run_threads, thread_outcomes
from trainfold.backends.runs.api import load
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import HalfRestored, InvalidArgument, RankFailed, RanksDisagree, SaveFailedElsewhere
from trainfold.core.format.fingerprint import fingerprint

LAYERS = 6
STRIDE = 1 if os.environ.get("HYPOTHESIS_PROFILE") in ("laws", "soak") else 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(3, 4)
        self.h = nn.ModuleDict(
            {str(index): nn.Sequential(nn.Linear(4, 4), nn.Dropout(index / 10)) for index in range(LAYERS)}
        )
        self.norm = nn.BatchNorm1d(4)


torch.manual_seed(0)
WHOLE = Model()


def cut(index, count):
    """A stage of the model, from the same values."""
    model = copy.deepcopy(WHOLE)  # the ranks are threads, and share torch's random stream
    for name in [name for name in model.h if int(name) * count // LAYERS != index]:
        del model.h[name]
    if index:
        model.emb = None
    if index < count - 1:
        model.norm = None
    return model


def stages_of(rank, ranks, count):
    return [Stage(cut(index, count), index, count) for index in range(rank, count, ranks)]


def optimizer_of(modules):
    """Two groups, the second of which some stages have no parameters for."""
    named = [pair for module in modules for pair in module.named_parameters()]
    decayed = [value for name, value in named if "norm" not in name]
    rest = [value for name, value in named if "norm" in name]
    found = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=0.1)
    for name, value in named:  # the same gradients whatever the stages are
        value.grad = torch.full_like(value, float(len(name)))
    return found


def train(rank, ranks, count, *, steps, store, world):
    """Step to a number of steps from the newest checkpoint, and save each step."""
    stages = stages_of(rank, ranks, count)
    modules = [each.submod for each in stages]
    optimizer = optimizer_of(modules)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    live = attach(stages if len(stages) > 1 else stages[0], optimizer, scheduler=scheduler)
    with CheckpointManager(store, collectives=world) as manager:
        manager.restore(live)
        while live.progress.step < steps:
            optimizer_step(modules, optimizer)
            scheduler.step()
            live.advance(samples=4)
            manager.save(live)
    return live.capture()


def optimizer_step(modules, optimizer):
    for module in modules:
        for name, value in module.named_parameters():
            value.grad = torch.full_like(value, float(len(name)))
    optimizer.step()
    optimizer.zero_grad()


def run(ranks, count, *, steps, store):
    return run_threads(ranks, lambda world: train(world.rank, ranks, count, steps=steps, store=store, world=world))


def whole(store):
    """What one process that has the whole model loads: model and optimizer, as one digest each."""
    model = cut(0, 1)
    optimizer = optimizer_of([model])
    live = attach(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    with CheckpointManager(store) as manager:
        manager.restore(live)
    found = fingerprint(live.capture())
    return {name: found[name] for name in ("model", "optimizer", "scheduler", "trainer")}


@pytest.mark.filterwarnings("ignore::trainfold.backends.runs.load.CheckpointPassedOver")  # what a save has written
@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_of_a_pipeline_that_fails_at_any_call_ends_all_ranks_in_that_call(count, caplog):
    """C07, P06: to describe the stages and to put them together too. The other rank names it, and a restart continues from a step that both have."""
    caplog.set_level(logging.CRITICAL)

    def outcomes(store, steps, fault=None):
        work = lambda world: train(world.rank, 2, count, steps=steps, store=store, world=world)
        return thread_outcomes(2, work, fail_at=fault)

    def first_run():
        store = MemoryStore()
        assert [each.error for each in outcomes(store, 1)] == [None, None]
        return store

    whole_run, other = outcomes(first_run(), 2)
    assert whole_run.error is other.error is None
    assert whole_run.schedule == other.schedule
    calls = whole_run.schedule
    assert [call.doing for call in calls].count("describe its stages") == 2
    cases = [(index, victim) for index in range(len(calls)) for victim in (0, 1)]
    for index, victim in cases[count % STRIDE :: STRIDE]:
        store = first_run()
        ended = outcomes(store, 2, RankFault(victim, index))
        failed, survivor = ended[victim], ended[1 - victim]
        case = calls[index], victim, failed.error, survivor.error
        assert isinstance(failed.error, InjectedFailure | HalfRestored), case
        assert isinstance(survivor.error, RankFailed | SaveFailedElsewhere | HalfRestored), case
        assert survivor.error.rank == victim, case
        assert {len(each.schedule) for each in ended} == {index + 1}, case
        again = outcomes(store, 2)
        assert [(each.error, each.schedule == again[0].schedule) for each in again] == [(None, True)] * 2, case


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 4), (3, 3), (1, 2)])
def test_stages_are_saved_as_the_whole_model_and_other_stages_continue(ranks, count):
    """I05, X11: group by group, also where a stage has no parameter of a group; with settings of each layer."""
    store, expected = MemoryStore(), MemoryStore()
    run(1, 1, steps=4, store=expected)
    run(2, 2, steps=1, store=store)
    run(ranks, count, steps=3, store=store)
    run(3, 6, steps=4, store=store)
    assert whole(store) == whole(expected)


def test_layers_counted_from_0_on_each_stage_are_refused_at_the_first_save():
    """X11, W24: a ModuleList of the layers of a stage."""

    def save(world):
        stage = Stage(nn.ModuleList([nn.Linear(2, 2)]), world.rank, 2)
        nn.init.constant_(stage.submod[0].weight, world.rank)
        live = attach(stage, torch.optim.SGD(stage.submod.parameters(), lr=0.1))
        with CheckpointManager(store, collectives=world) as manager:
            manager.save(live)

    store = MemoryStore()
    with pytest.raises(
        RanksDisagree, match=r"model.params\['0.weight'\].*rank 0.*rank 1.*a ModuleList of layers counts from 0"
    ):
        run_threads(2, save)
    assert not [name for name in store.list("") if name.startswith("step")]


def test_stages_of_two_pipelines_are_refused():
    with pytest.raises(InvalidArgument, match="stages of one pipeline"):
        attach([Stage(cut(0, 2), 0, 2), Stage(cut(1, 2), 1, 3)])


def test_a_stage_that_is_saved_alone_is_refused():
    """W24: a part of a model must not look like a whole one."""
    with CheckpointManager(MemoryStore()) as manager, pytest.raises(RanksDisagree, match=r"stage 0 of 2"):
        manager.save(attach(Stage(cut(0, 2), 0, 2)))


def test_the_order_of_the_stages_in_the_list_does_not_matter():
    store = MemoryStore()
    stages = [Stage(cut(index, 2), index, 2) for index in (1, 0)]
    with CheckpointManager(store) as manager:
        manager.save(attach(stages))
    state = attach(cut(0, 1)).capture()
    assert fingerprint(load(store, like=state, reset={"rng": "another"}))["model"] == fingerprint(state)["model"]


def test_an_average_of_all_stages_of_a_rank_has_the_names_of_the_whole_model():
    """W18, I05: two stages a rank, then one, then one process that has the whole model."""
    store = MemoryStore()

    def train(world, count):
        live = attach(stages_of(world.rank, world.world_size, count))
        model = live.modules[0]
        average = AveragedModel(model)
        live.register("ema", average)
        with CheckpointManager(store, collectives=world) as manager:
            manager.restore(live)
            for each in model.parameters():
                each.data += 1.0
            average.update_parameters(model)
            live.advance(samples=1)
            manager.save(live)
        return live.capture().extra["ema"]

    run_threads(2, lambda world: train(world, 4))
    run_threads(2, lambda world: train(world, 2))
    (found,) = run_threads(1, lambda world: train(world, 1))
    assert found.params.keys() == dict(WHOLE.named_parameters()).keys()
    assert found.buffers["n_averaged"] == 3
    # the first update copies: the mean of 1, 2 and 3 is added
    torch.testing.assert_close(found.params["h.4.0.bias"], WHOLE.h["4"][0].bias + 2.0)


@pytest.mark.parametrize("count", [2, 4])
def test_an_average_of_stages_that_counts_them_is_refused(count):
    """W24: its names would have the number of a stage on this rank, and fit no other number of stages."""
    stages = stages_of(0, 2, count)
    average = AveragedModel(nn.ModuleList([each.submod for each in stages]))
    said = r"extra\['ema'\].*found '0\.emb\.weight'.*AveragedModel\(live\.modules\[0\]\)"
    with pytest.raises(InvalidArgument, match=said):
        attach(stages, extra={"ema": average})
    live = attach(stages)
    with pytest.raises(InvalidArgument, match=said):
        live.register("ema", average)
    live.register("head", nn.Sequential(nn.Linear(2, 2)))
    assert attach(cut(0, 1), extra={"head": nn.ModuleList([cut(0, 1)])}).modules  # a whole model may be counted


def told_at_the_first_save(change, sharing=None):
    """What each of four ranks raises, of which 1 and 3 have the second of two stages; ``change`` changes what rank 3 attaches."""

    def save(world):
        rank, index = world.rank, world.rank % 2
        model, limit = cut(index, 2), Limit(start=2, local_rank=rank)
        model.tp_rank = rank
        model.h[str(3 * index + 1)].group_rank = rank
        if rank == 3:
            change(model, limit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = attach(Stage(model, index, 2), optimizer, extra={"limit": limit}, sharing=sharing)
        live.advance(samples=1)
        with CheckpointManager(store, collectives=world) as manager:
            try:
                manager.save(live)
            except RanksDisagree as error:
                return str(error)

    store = MemoryStore()
    return run_threads(4, save)


def other_dropout(model, limit):
    model.h["4"][1].p = 0.75


def other_limit(model, limit):
    limit.start = 3


def frozen(model, limit):
    model.h["4"][0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_dropout, r"contract['attached.model.h.*.*.p']: expected what rank 1 has: [None, 0.3, None, 0.4, None, 0.5], found on rank 3: [None, 0.3, None, 0.75, None, 0.5]"),
        (other_limit, "contract['attached.limit.start']: expected what rank 1 has: 2, found on rank 3: 3"),
        (frozen, "contract['attached.optimizer.frozen']: expected what rank 1 has: [], found on rank 3: ['h.4.0.weight']"),
    ],
)  # fmt: skip
def test_settings_of_one_replica_of_a_stage_are_refused_with_the_rank_and_the_key(change, said):
    """R07, W24: equal gradients keep the weights of replicas equal, so that nothing else shows it."""
    for text in told_at_the_first_save(change):
        assert said in str(text)


def test_settings_that_replicas_of_a_stage_have_of_their_own_are_spared():
    """By their names, and by a declaration."""
    assert told_at_the_first_save(lambda model, limit: None) == [None] * 4
    assert told_at_the_first_save(other_limit, {"limit.settings": "each_rank"}) == [None] * 4
    assert told_at_the_first_save(other_dropout, {"model.settings": "each_rank"}) == [None] * 4


@pytest.mark.parametrize(
    ("kind", "microbatches", "scaled", "found"),
    [
        (ScheduleGPipe, 4, True, None),
        (Schedule1F1B, 8, True, "8 microbatches, gradients / 8"),
        (Schedule1F1B, 4, False, "4 microbatches, gradients / 1"),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_another_schedule_at_a_resume_is_said(kind, microbatches, scaled, found):
    """A12, N02: other microbatches round the gradients otherwise, and without ``scale_grads`` they are larger."""
    store = MemoryStore()

    def train(kind, microbatches, *, scaled):
        stage = PipelineStage(nn.Linear(2, 1), 0, 1, torch.device("cpu"))
        schedule = kind(stage, microbatches, loss_fn=nn.functional.mse_loss, scale_grads=scaled)
        live = attach(stage, torch.optim.SGD(stage.submod.parameters(), lr=0.1))
        with CheckpointManager(store, every=None) as manager:
            manager.restore(live)
            schedule.step(torch.ones(8, 2), target=torch.ones(8, 1))
            live.check(1.0)
            live.advance(samples=8)
            manager.save(live)

    train(Schedule1F1B, 4, scaled=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(kind, microbatches, scaled=scaled)
    said = [str(each.message) for each in caught if issubclass(each.category, ResumeDrift)]
    assert len(said) == (found is not None), said
    for text in said:
        assert f"live.check.schedule: saved 4 microbatches, gradients / 4, wanted {found}" in text

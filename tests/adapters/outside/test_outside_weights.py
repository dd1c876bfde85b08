"""Weights from outside a run's checkpoints: the whole model, or its frozen part. They are supplied at each load point, and all of them, or nothing trains."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.runs.scan import read_manifest
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, InvalidState, RankFailed, ResumeRefused, SourceFailed
from trainfold.core.state.state import Progress
from trainfold.ranks import SingleProcess
from trainfold.weights import ByScript, Cast, CheckpointWeights, FirstRank, Frozen, take_weights


def network(seed, *, frozen=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(not frozen)
    return model


def base_run(seed=7, **extra):
    """A run with the weights of a network, and that network."""
    store, model = MemoryStore(), network(seed)
    save(attach(model, extra=extra).capture(), store)
    return store, model


class Run:
    """A script: what it builds depends on its seed, and what it trains on on the step alone."""

    def __init__(self, seed, weights, *, frozen=False, store=None, **manager):
        self.model = network(seed, frozen=frozen)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.live = attach(self.model, self.optimizer, weights=weights)
        self.manager = None if store is None else CheckpointManager(store, every=2, **manager)

    def train(self, steps):
        for _ in range(steps):
            torch.manual_seed(self.live.progress.step)
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.live.advance(samples=8)
            if self.manager is not None:
                self.manager.step(self.live)
        return self

    def restored(self):
        self.manager.restore(self.live)
        return self


def bits(model):
    return {name: each.tolist() for name, each in model.state_dict().items()}


class Held:
    """A source of one's own, which notes how often it was asked."""

    def __init__(self, tensors):
        self.tensors, self.asked = tensors, 0

    def supply(self, wanted):
        self.asked += 1
        return iter([(name, each) for name, each in self.tensors.items() if name in wanted])


class Without(Held):
    """It supplies what it was not asked for, too."""

    def supply(self, wanted):
        return iter(self.tensors.items())


def test_a_run_whose_weights_are_outside_saves_none_and_takes_them_at_each_start():
    """J01: on fresh runs and at resumes. J05: the load does not touch them. B03, C05: the checkpoint has no model, and that is recorded."""
    base, model = base_run()
    store, source = MemoryStore(), Held({**model.state_dict()})
    first = Run(1, source, store=store).restored()
    assert bits(first.model) == bits(model)
    with first.manager:
        first.train(4)
    assert bits(first.model) != bits(model)
    manifest = read_manifest(store, "step-00000004")
    assert manifest.omitted == ("model",)
    assert not [name for name in store.list("step-00000004") if name.startswith("model")]
    again = Run(2, CheckpointWeights(base), store=store).restored()
    assert (again.live.progress.step, source.asked) == (4, 1)
    assert bits(again.model) == bits(model)
    assert again.optimizer.state_dict()["state"][0]["step"] == 4
    with again.manager:
        again.train(2)
        assert bits(again.model) != bits(model)
        assert again.manager.restore(again.live).run == store.url  # a rewind in the same process
        assert bits(again.model) == bits(model)
    assert read_manifest(store, "step-00000006").head.step == 6


def test_a_run_with_a_frozen_part_outside_resumes_bit_for_bit_without_that_part_in_its_checkpoints():
    """B16: the declaration leaves out what is frozen, and nothing else. J06: the trained parameters, all buffers and slots are saved."""
    base, model = base_run()
    reference = Run(1, None, frozen=True)
    reference.model.load_state_dict(
        network(1).state_dict() | {k: v for k, v in model.state_dict().items() if k[0] == "0"}
    )
    reference.train(6)
    store = MemoryStore()
    with Run(1, Frozen(CheckpointWeights(base)), frozen=True, store=store).restored().manager as manager:
        first = Run(1, Frozen(CheckpointWeights(base)), frozen=True)
        manager.restore(first.live)
        first.manager = manager
        first.train(4)
    paths = [each.path for each in read_manifest(store, "step-00000004").component("model").tensors[0]]
    assert not [path for path in paths if "'0." in path]
    assert [path for path in paths if "running_mean" in path]
    again = Run(2, Frozen(CheckpointWeights(base)), frozen=True, store=store).restored()
    with again.manager:
        again.train(2)
    assert bits(again.model) == bits(reference.model)


def test_a_resume_with_other_frozen_weights_is_refused_wherever_they_come_from():
    """J07: recorded and verified by content: another place with the same content is fine."""
    base, model = base_run()
    store = MemoryStore()
    with Run(1, Frozen(CheckpointWeights(base)), frozen=True, store=store).restored().manager as manager:
        run = Run(1, Frozen(CheckpointWeights(base)), frozen=True)
        manager.restore(run.live)
        run.manager = manager
        run.train(2)
    moved = Held({name: each.clone() for name, each in model.state_dict().items()})
    run = Run(2, Frozen(moved), frozen=True, store=store).restored()
    run.manager.close()
    other = Run(3, Frozen(CheckpointWeights(base_run(8)[0])), frozen=True, store=store)
    with other.manager, pytest.raises(ResumeRefused, match=r"outside_weights +weights.outside: saved sum:"):
        other.manager.restore(other.live)
    plain = Run(3, None, frozen=True, store=store)
    with plain.manager, pytest.raises(ResumeRefused, match=r"outside_weights +weights.outside"):
        plain.manager.restore(plain.live)
    meant = Run(
        3, Frozen(CheckpointWeights(base_run(8)[0])), frozen=True, store=store, policy={"outside_weights": "warn"}
    )
    with meant.manager, pytest.warns(ResumeDrift, match="outside_weights"):
        assert not meant.manager.restore(meant.live).is_fresh


def test_nothing_trains_or_is_saved_before_the_source_was_asked():
    """J02: the call that was forgotten is named."""
    base, _ = base_run()
    run = Run(1, CheckpointWeights(base))
    with pytest.raises(
        InvalidState, match=r"live.advance: expected weights from CheckpointWeights.*manager.restore\(live\)"
    ):
        run.train(1)
    run.live.take_weights()
    run.train(1)
    with pytest.raises(InvalidArgument, match="a source of weights"):
        Run(1, None).live.take_weights()
    with pytest.raises(InvalidArgument, match=r"trainfold.weights.CheckpointWeights\(run\)"):
        Run(1, "runs/base")


def test_a_run_that_leaves_out_its_model_without_a_source_is_refused_before_it_trains():
    """J02, B03: leaving out the model is the mode of weights from outside, not a way to forget them."""
    run = Run(1, None, store=MemoryStore(), components=["optimizer", "trainer", "rng"])
    with run.manager, pytest.raises(InvalidArgument, match=r"a source of its weights.*trainfold.weights.ByScript\(\)"):
        run.manager.restore(run.live)
    run = Run(1, ByScript(), store=MemoryStore(), components=["optimizer", "trainer", "rng"]).restored()
    with run.manager:
        mine = bits(run.model)
        assert run.manager.restore(run.live).is_fresh
        assert bits(run.model) == mine
        run.train(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda found: found.pop("1.running_mean"),
            r"expected all 9 tensors from Held, found nothing for 1.running_mean",
        ),
        (
            lambda found: found.update({"0.bias": torch.zeros(4)}),
            r"weights\['0.bias'\] from Held: expected the shape \[3\], found \[4\]",
        ),
        (
            lambda found: found.update({"0.bias": torch.zeros(3).half()}),
            r"weights\['0.bias'\] from Held: expected float32, found float16",
        ),
        (lambda found: found.update({"1.num_batches_tracked": torch.zeros(())}), "expected int64, found float32"),
    ],
)
def test_what_a_source_lacks_or_has_otherwise_is_named_and_nothing_trains(change, said):
    """J03: every persistent tensor is accounted for, buffers too."""
    tensors = {**network(7).state_dict()}
    change(tensors)
    run = Run(1, Held(tensors), store=MemoryStore())
    with run.manager, pytest.raises(InvalidState, match=said):
        run.manager.restore(run.live)
    with pytest.raises(InvalidState, match="the source was not asked yet"):
        run.train(1)


def test_what_was_not_asked_for_is_named():
    """J03: a source for another model would fill half of this one in silence."""
    run = Run(1, Without({**network(7).state_dict(), "head.weight": torch.zeros(1)}))
    with pytest.raises(
        InvalidState, match=r"weights\['head.weight'\] from Without: expected one of the 9 names that were asked for"
    ):
        run.live.take_weights()


def test_another_dtype_is_rounded_only_where_that_is_said():
    """P20: a change of dtype is never silent."""
    halves = {name: each.half() if each.is_floating_point() else each for name, each in network(7).state_dict().items()}
    run = Run(1, Cast(Held(halves)))
    run.live.take_weights()
    assert run.model[0].weight.dtype == torch.float32
    assert torch.equal(run.model[0].weight, halves["0.weight"].float())


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_a_tied_tensor_needs_one_of_its_names_and_two_values_for_it_are_refused():
    """B19, P23."""
    value = torch.randn(5, 2)
    for name in ("embed.weight", "head.weight"):
        live = attach(model := tied(), weights=Held({name: value}))
        live.take_weights()
        assert torch.equal(model["head"].weight, value)
        assert model["head"].weight is model["embed"].weight
    both = attach(tied(), weights=Held({"embed.weight": value, "head.weight": value.clone()}))
    both.take_weights()
    live = attach(tied(), weights=Held({"embed.weight": value, "head.weight": value + 1}))
    with pytest.raises(
        InvalidState,
        match=r"weights\['head.weight'\] from Held: expected the bits of 'embed.weight', to which it is tied",
    ):
        live.take_weights()


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [(0.0, -0.0, True), (float("nan"), float("nan"), False), (1.0, 1.0, False), (1.0, 2.0, True)],
)
def test_tied_values_are_compared_bit_by_bit(one, other, is_refused):
    """B19: two NaN were called other values, and -0.0 the value of 0.0."""
    live = attach(
        tied(), weights=Held({"embed.weight": torch.full((5, 2), one), "head.weight": torch.full((5, 2), other)})
    )
    if is_refused:
        with pytest.raises(InvalidState, match="expected the bits of 'embed"):
            live.take_weights()
    else:
        live.take_weights()


def faulty(step):
    """A source whose own code does something wrong at its second tensor."""

    class Mine:
        def supply(self, wanted):
            names = list(wanted)
            yield names[0], network(7).state_dict()[names[0]]
            yield step(names, network(7).state_dict())

    return Mine()


@pytest.mark.parametrize("door", ["live", "state", "first rank", "cast"])
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda names, found: found["no.such"], "KeyError: 'no.such', after 1 tensor, the last of them '0.weight'"),
        (lambda names, found: found.shape, "AttributeError: .*after 1 tensor"),
        (lambda names, found: None + 1, "TypeError: .*after 1 tensor"),
        (lambda names, found: names[1], "found .*after 1 tensor"),
        (lambda names, found: (names[1], [1.0]), "found .*after 1 tensor"),
        (lambda names, found: (names[1], found[names[1]].to("meta")), "'0.bias'.* on the meta device"),
        (lambda names, found: (names[1], found[names[1]].to_sparse()), "'0.bias'.* the layout torch.sparse_coo"),
        (lambda names, found: (names[0], found[names[0]]), "'0.weight'.* expected each name once"),
    ],
)
def test_a_fault_of_a_source_names_the_source_and_where_it_was(door, step, said):
    """J03, J04: a bare KeyError came out of a load, from nowhere."""
    source = faulty(step)
    source = {"first rank": lambda: FirstRank(source, SingleProcess()), "cast": lambda: Cast(source)}.get(
        door, lambda: source
    )()
    if door == "state":
        state = trainfold.init_state(network(0), trainfold.optimizer(torch.optim.SGD, lr=0.1))
        take = lambda: take_weights(state, source)
    else:
        take = attach(network(0), weights=source).take_weights
    with pytest.raises((SourceFailed, InvalidState), match=said) as caught:
        take()
    assert re.search("from (Cast.)?(Mine|FirstRank)", caught.value.where)
    if "Error" in said:
        assert type(caught.value.__cause__).__name__ in said


@pytest.mark.parametrize("returned", [None, 3, torch.ones(2)])
def test_a_source_that_returns_something_else_is_named(returned):
    """J03."""

    class Mine:
        def supply(self, wanted):
            return returned

    with pytest.raises(SourceFailed, match="weights from Mine: expected a name and a tensor"):
        attach(network(0), weights=Mine()).take_weights()


def test_what_no_rank_has_asked_for_is_refused_also_where_rank_0_sends_it():
    """J03: it was dropped in silence."""
    tensors = network(7).state_dict() | {"head.weight": torch.zeros(1)}

    def start(world):
        with pytest.raises((InvalidState, RankFailed), match=r"'head.weight'. from Without: expected one of the 9"):
            attach(network(0), weights=FirstRank(Without(tensors), world)).take_weights(world)

    run_threads(2, start)


def test_a_source_that_dies_midway_leaves_a_model_that_nothing_trains_or_saves():
    """J03, J02: half of the live weights are overwritten by then; another supply makes them whole."""
    source = Held(network(7).state_dict())
    run = Run(1, source, store=MemoryStore()).restored()
    with run.manager:
        run.train(1)
        trained = bits(run.model)
        run.live.outside._source = faulty(lambda names, found: found["no.such"])
        with pytest.raises(SourceFailed):
            run.live.take_weights()
        assert bits(run.model)["0.weight"] == bits(network(7))["0.weight"] != trained["0.weight"]
        assert bits(run.model)["2.weight"] == trained["2.weight"]
        for call in (lambda: run.live.advance(samples=1), lambda: run.manager.save(run.live)):
            with pytest.raises(InvalidState, match="expected weights from"):
                call()
        run.live.outside._source = source
        run.live.take_weights()
        run.train(1)


def test_a_frozen_parameter_that_is_trained_later_is_not_lost_in_silence():
    """B16: only if it is actually frozen."""
    base, _ = base_run()
    run = Run(1, Frozen(CheckpointWeights(base)), frozen=True, store=MemoryStore()).restored()
    run.model[0].weight.requires_grad_(True)
    with run.manager, pytest.raises(InvalidState, match=r"model.params\['0.weight'\]: expected a frozen parameter"):
        run.train(2)
    with pytest.raises(InvalidArgument, match="a model with frozen parameters"):
        Run(1, Frozen(CheckpointWeights(base)))


def test_an_average_of_another_run_can_be_the_weights():
    """B13: the averaged weights are a component of their own."""
    average = torch.optim.swa_utils.AveragedModel(network(9))
    base, _ = base_run(average=average)
    run = Run(1, Held({}), frozen=False)
    run.live = attach(run.model, weights=CheckpointWeights(base, component="average"))
    run.live.take_weights()
    assert bits(run.model) == bits(average.module)


def test_a_failure_of_one_rank_is_that_of_all_and_rank_0_can_send_to_the_others():
    """J04."""
    tensors = network(7).state_dict()

    def outcomes(size, source):
        models, wanted = [network(rank) for rank in range(size)], bits(network(7))

        def start(world):
            try:
                attach(models[world.rank], weights=source(world)).take_weights(world)
            except (InvalidState, RankFailed) as error:
                return str(error)
            return bits(models[world.rank]) == wanted

        return run_threads(size, start)

    lacks = {name: each for name, each in tensors.items() if name != "0.bias"}
    for source in (lambda w: Held(lacks if w.rank else tensors), lambda w: FirstRank(Held(lacks), w)):
        assert all("nothing for 0.bias" in each for each in outcomes(2, source))
    assert outcomes(3, lambda w: FirstRank(Held(tensors if w.rank == 0 else {}), w)) == [True] * 3


def test_a_source_that_fails_on_rank_0_or_is_refused_on_another_rank_ends_on_all():
    """J04: a rank that refuses a tensor takes part to the end; it would leave the others in a broadcast."""
    tensors = network(7).state_dict()

    class Fails(Held):
        def supply(self, wanted):
            yield from list(super().supply(wanted))[:2]
            raise OSError("the server is gone")

    def outcomes(source, *models):
        def start(world):
            try:
                attach(models[world.rank], weights=FirstRank(source, world)).take_weights(world)
            except (RankFailed, SourceFailed, InvalidState) as error:
                return str(error)
            return "taken"

        return run_threads(2, start)

    assert all("the server is gone" in each for each in outcomes(Fails(tensors), network(0), network(1)))
    narrow = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(3), nn.Linear(3, 1))
    found = outcomes(Held(tensors), network(0), narrow)
    assert all("weights['0.weight'] from Held: expected the shape [2, 4]" in each for each in found)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(0, 4), st.booleans(), st.integers(0, 3))
def test_a_run_killed_anywhere_is_the_run_that_was_not(steps, killed_at, frozen, seed):
    """B16, J01: Hypothesis chooses the kill; the weights of the whole-model mode are those of the source after each start."""
    base, model = base_run()
    source = CheckpointWeights(base)
    store = MemoryStore()
    weights = Frozen(source) if frozen else source
    run = Run(seed, weights, frozen=frozen, store=store).restored()
    with run.manager:
        run.train(min(killed_at, steps))
        saved = run.live.progress.step // 2 * 2
        kept = bits(run.model)
    again = Run(seed + 1, weights, frozen=frozen, store=store).restored()
    with again.manager:
        assert again.live.progress.step == saved
        if frozen and saved == run.live.progress.step and saved:
            assert bits(again.model) == kept
        if not frozen:
            assert bits(again.model) == bits(model)


@pytest.mark.parametrize("door", ["save", "manager.save", "manager.step"])
def test_a_captured_run_leaves_its_weights_out_by_every_door_too(door):
    """B03: the state of a run whose model comes from outside had the model, and every save of that state wrote it."""
    base, _ = base_run()
    state = Run(1, CheckpointWeights(base), store=MemoryStore()).restored().live.capture()
    store = MemoryStore()
    with CheckpointManager(store, every=1, at_end=False) as manager:
        saved = {"save": lambda: save(state, store, lock=False), "manager.save": lambda: manager.save(state),
                 "manager.step": lambda: manager.step(state.evolve(trainer=Progress(step=1)))}[door]()  # fmt: skip
    found = read_manifest(store, f"step-{int(door == 'manager.step'):08d}")
    assert [each.name for each in found.components] == ["optimizer", "trainer", "rng"]
    assert found.omitted == ("model",), saved
    loaded = trainfold.load(store, like=state)
    assert loaded.model is state.model
    assert trainfold.plan(store, like=state)
    named = trainfold.save(state, store, components=["model", "trainer"])  # which may be meant
    assert named.omitted == ("optimizer", "rng")
    assert trainfold.save(trainfold.select(state, ["model", "trainer"]), store).omitted == ("optimizer", "rng")
    assert trainfold.save(loaded, store).omitted == ("model",)

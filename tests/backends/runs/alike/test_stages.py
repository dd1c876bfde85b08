"""Stages of a pipeline on ranks: their names make one model, whatever the number of stages."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.runs.api import load, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core import tree
from trainfold.core.errors import RanksDisagree, ResumeRefused
from trainfold.core.format.fingerprint import content_fingerprint, fingerprint
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement
from trainfold.core.layout.shard import Shard
from trainfold.core.layout.stage import make_stage
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState

LAYERS = 8
NAMES = ["emb.weight", *(f"h.{index}.weight" for index in range(LAYERS)), "out.weight", "out.bias"]


def whole_state(seed=0):
    """A model, its optimizer with two groups, and an average of the weights."""
    generator = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(3, 2, generator=generator) for name in NAMES}
    slots = {
        name: {"exp_avg": torch.randn(3, 2, generator=generator), "step": torch.tensor(7.0)}
        for name in NAMES
        if name != "h.3.weight"  # it never had a gradient
    }
    decayed = tuple(name for name in NAMES if name.endswith("weight"))
    rest = tuple(name for name in NAMES if name not in decayed)
    groups = (ParamGroup({"lr": 0.1, "decay": 0.5}, decayed), ParamGroup({"lr": 0.1, "decay": 0.0}, rest))
    averages = ModelState(
        Leaves({name: value + 1 for name, value in params.items()}), Leaves({"n": torch.tensor(seed)})
    )
    return TrainState(
        model=ModelState(Leaves(params), Leaves({"h.0.seen": torch.tensor(3)})),
        optimizer=OptimizerState("AdamW", Leaves(slots), groups, with_grad=decayed),
        trainer=Progress(step=7),
        extra={"ema": averages},
    )


def part_of(state, names, stage):
    """The stage that has some of the names."""

    def kept(leaves):
        return Leaves({name: value for name, value in leaves.items() if name in names})

    def of_module(module):
        buffers = {
            n: each for n, each in module.buffers.items() if n == "n" or f"{n.rpartition('.')[0]}.weight" in names
        }
        return attrs.evolve(module, params=kept(module.params), buffers=Leaves(buffers))

    optimizer = state.optimizer
    groups = tuple(
        attrs.evolve(each, params=tuple(name for name in each.params if name in names)) for each in optimizer.groups
    )
    with_grad = tuple(name for name in optimizer.with_grad if name in names)
    return state.evolve(
        model=of_module(state.model),
        optimizer=attrs.evolve(optimizer, slots=kept(optimizer.slots), groups=groups, with_grad=with_grad),
        extra={"ema": of_module(state.extra["ema"])},
        stage=stage,
    )


@attrs.frozen
class Pipeline:
    """Which stages a rank holds, and which names a stage has."""

    cuts: tuple
    stages_a_rank: int
    replicas: int

    @property
    def world_size(self):
        return len(self.names) // self.stages_a_rank * self.replicas

    @property
    def names(self):
        edges = [0, *self.cuts, len(NAMES)]
        return [NAMES[start:stop] for start, stop in itertools.pairwise(edges)]

    def state(self, whole, rank):
        ranks = self.world_size // self.replicas
        mine = [rank % ranks + ranks * turn for turn in range(self.stages_a_rank)]
        return part_of(whole, [n for index in mine for n in self.names[index]], make_stage(mine, len(self.names)))


@st.composite
def pipelines(draw):
    stages_a_rank = draw(st.sampled_from([1, 1, 2]))
    count = draw(st.integers(1, 4 // stages_a_rank)) * stages_a_rank
    cuts = draw(st.sets(st.integers(1, len(NAMES) - 1), min_size=count - 1, max_size=count - 1))
    return Pipeline(tuple(sorted(cuts)), stages_a_rank, draw(st.sampled_from([1, 1, 2])))


def zeros_like(state):
    """The same structure with other values."""
    return tree.map_tensors(torch.zeros_like, state).evolve(stage=state.stage)


@given(saves=pipelines(), loads=pipelines())
@settings(max_examples=40, deadline=None)
def test_any_number_of_stages_is_one_checkpoint(saves, loads):
    """I05, X11: each name once over ranks, so one process, or other stages, load it; its fingerprints are those of the whole model."""
    store, whole = MemoryStore(), whole_state()
    results = run_threads(
        saves.world_size, lambda world: save(saves.state(whole, world.rank), store, collectives=world)
    )
    assert {tuple(each.fingerprints.items()) for each in results} == {tuple(fingerprint(whole).items())}
    assert fingerprint(load(store, like=zeros_like(whole))) == fingerprint(whole)
    fingerprints = run_threads(
        saves.world_size,
        lambda world: content_fingerprint(saves.state(whole, world.rank), collectives=world),
    )
    assert all(each == content_fingerprint(whole) for each in fingerprints)
    loaded = run_threads(
        loads.world_size,
        lambda world: load(store, like=zeros_like(loads.state(whole, world.rank)), collectives=world),
    )
    for rank, state in enumerate(loaded):
        assert fingerprint(state) == fingerprint(loads.state(whole, rank))
        assert state.stage == loads.state(whole, rank).stage


def saved_by(*states):
    """Save on as many ranks; return the store."""
    store = MemoryStore()
    run_threads(len(states), lambda world: save(states[world.rank], store, collectives=world))
    return store


def halves(whole):
    return [part_of(whole, NAMES[:5], make_stage([0], 2)), part_of(whole, NAMES[5:], make_stage([1], 2))]


def with_param(state, name, value):
    return state.evolve(model=attrs.evolve(state.model, params=Leaves({**state.model.params, name: value})))


def test_a_name_that_two_stages_have_is_stored_once_if_it_is_equal_and_refused_if_not():
    """W24, X11: a weight that stages share, or two tensors of one name, as a ModuleList counts them."""
    first, second = halves(whole_state())
    shared = first.model.params["emb.weight"]
    store = saved_by(first, with_param(second, "emb.weight", shared.clone()))
    assert fingerprint(load(store, like=whole_state())) == fingerprint(whole_state())
    store = MemoryStore()
    other = with_param(second, "emb.weight", shared + 1)
    with pytest.raises(RanksDisagree, match=r"model.params\['emb.weight'\].*rank 0.*rank 1.*ModuleList"):
        run_threads(2, lambda world: save((first, other)[world.rank], store, collectives=world))
    assert not [name for name in store.list("") if name.startswith("step")]


def test_stages_with_the_same_names_are_not_replicas():
    """W24: grouping layers as a ModuleList gives each stage the names from 0 on."""
    states = [
        TrainState(model=ModelState(Leaves({"0.weight": torch.full((2,), float(rank))}), Leaves()), trainer=Progress(), stage=make_stage([rank], 2))
        for rank in range(2)
    ]  # fmt: skip
    with pytest.raises(RanksDisagree, match=r"model.params\['0.weight'\]: expected one tensor of this name"):
        saved_by(*states)


def with_rate(state, index, **hyper):
    groups = list(state.optimizer.groups)
    groups[index] = attrs.evolve(groups[index], hyper={**groups[index].hyper, **hyper})
    return state.evolve(optimizer=attrs.evolve(state.optimizer, groups=tuple(groups)))


def without_stage(state):
    return state.evolve(stage=None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda first, second: (first, with_param(second, "emb.weight", torch.zeros(4))), r"model.params\['emb.weight'\]: expected float32\[3, 2\] on rank 0, found float32\[4\] on rank 1"),
        (lambda first, second: (first, with_rate(second, 1, decay=0.25)), r"optimizer.groups\[1\].hyper\['decay'\]: expected 0.0 on rank 0, found 0.25 on rank 1"),
        (lambda first, second: (first, with_rate(second, 1, eps=0.25)), r"optimizer.groups\[1\].hyper"),
        (lambda first, second: (first, second.evolve(optimizer=attrs.evolve(second.optimizer, groups=second.optimizer.groups[:1]))), "expected 2 param groups on rank 0, found 1 on rank 1; give the optimizer of each stage the param groups of the whole"),
        (lambda first, second: (first, without_stage(second)), "stage: expected stages of one pipeline.*a whole model on rank 1"),
        (lambda first, second: (first, second.evolve(stage=make_stage([1], 3))), "stage: expected"),
        (lambda first, second: (first, second.evolve(stage=make_stage([0], 2))), "stage: expected each stage on the ranks of one part"),
        (lambda first, second: (first, second.evolve(contract={"tokenizer": "b"})), r"contract\['tokenizer'\].*what rank 0 has: 'a', found on rank 1: 'b'"),
    ],
)  # fmt: skip
def test_stages_that_do_not_make_one_model_are_refused_before_anything_is_written(change, said):
    """W24: naming the leaf and both ranks."""
    first, second = (each.evolve(contract={"tokenizer": "a"}) for each in halves(whole_state()))
    store, states = MemoryStore(), change(first, second)
    with pytest.raises(RanksDisagree, match=said):
        run_threads(2, lambda world: save(states[world.rank], store, collectives=world))
    assert not store.list("")


def test_a_stage_alone_is_no_model():
    """W24: a part saved as if it were the whole."""
    with pytest.raises(RanksDisagree, match=r"stage 0 of 2.*with collectives"):
        save(halves(whole_state())[0], MemoryStore())
    with pytest.raises(RanksDisagree, match=r"stage 0 of 2.*with collectives"):
        load(saved_by(whole_state()), like=halves(whole_state())[0])


def test_what_no_stage_has_and_what_the_checkpoint_lacks_is_refused():
    """C01: the stages of all ranks are compared with the checkpoint as one model."""
    store, parts = saved_by(whole_state()), halves(whole_state())
    less = part_of(whole_state(), NAMES[5:-1], make_stage([1], 2))
    with pytest.raises(ResumeRefused, match=r"unexpected +model.params\['out.bias'\]"):
        run_threads(2, lambda world: load(store, like=(parts[0], less)[world.rank], collectives=world))
    more = with_param(parts[1], "new.weight", torch.zeros(2))
    with pytest.raises(ResumeRefused, match=r"model.params\['new.weight'\]"):
        run_threads(2, lambda world: load(store, like=(parts[0], more)[world.rank], collectives=world))


class Recorder:
    """A store that notes the files that are read."""

    def __init__(self, store):
        self.store, self.names = store, set()

    def __getattr__(self, verb):
        def call(name, *given, **more):
            if verb.startswith("read") and more.get("stop") != 8:  # the ranks look at the starts of all files together
                self.names.add(name.rpartition("/")[2])
            return getattr(self.store, verb)(name, *given, **more)

        found = getattr(self.store, verb)
        return call if callable(found) else found


def test_a_stage_reads_its_own_leaves_only():
    """C07: no byte of another stage; the index of its rank is not opened either."""
    states = [zeros_like(each) for each in halves(whole_state())]
    store = saved_by(*halves(whole_state()))
    recorders = [Recorder(store) for _ in states]
    run_threads(2, lambda world: load(recorders[world.rank], like=states[world.rank], collectives=world))
    data = [{name for name in each.names if "safetensors" in name} for each in recorders]
    common = {"ema-00000-of-00002.safetensors"}  # the count of averages, which all ranks have
    assert {name[-26:-21] for name in data[0]} == {"00000"}
    assert {name[-26:-21] for name in data[1] - common} == {"00001"}, data
    assert "index-00001-of-00002.json" not in recorders[0].names


def test_the_ranks_of_a_stage_share_its_leaves_and_the_others_hold_none_of_it():
    """I05, ADR-0035: each replica of a stage writes a half of it."""
    params = Leaves({name: torch.full((512, 256), float(index)) for index, name in enumerate("abcd")})
    whole = TrainState(model=ModelState(params, Leaves()), trainer=Progress(step=3))

    def stage(rank):
        held = Leaves({name: params[name] for name in ("ab", "cd")[rank // 2]})
        return whole.evolve(model=ModelState(held, Leaves()), stage=make_stage([rank // 2], 2))

    store = saved_by(*map(stage, range(4)))
    (step,) = [name for name in store.list("") if name.startswith("step")]
    sizes = [store.size(f"{step}/model-{rank:05d}-of-00004.safetensors") for rank in range(4)]
    assert all(abs(size - 2**19) < 2**13 for size in sizes), sizes
    assert fingerprint(load(store, like=zeros_like(whole))) == fingerprint(whole)


def test_replicas_of_a_stage_that_differ_in_a_bit_are_refused_by_name():
    """W24: between the ranks of one stage, and not between stages."""
    first, second = halves(whole_state())
    odd = with_param(first, "h.2.weight", first.model.params["h.2.weight"] + 1)
    with pytest.raises(RanksDisagree, match=r"model.params\['h.2.weight'\].*rank 0.*rank 2"):
        saved_by(first, second, odd, second)
    assert saved_by(first, second, first, second).list("")


@pytest.mark.parametrize("other", [{"live.check.clip_norm": 0.5, "tokenizer": "a"}, {"tokenizer": "a"}])
def test_replicas_of_a_stage_with_other_contracts_are_refused_by_key(other):
    """W24, R07: such as another limit of the gradients' norm; it was silent, because the first rank of each stage spoke for it."""
    first, second = (
        each.evolve(contract={"tokenizer": "a", "live.check.clip_norm": 1.0}) for each in halves(whole_state())
    )
    said = r"contract\['live.check.clip_norm'\]: expected what rank 1 has: 1.0, found on rank 3: (0.5|'nothing'); .*same settings"
    with pytest.raises(RanksDisagree, match=said):
        saved_by(first, second, first, second.evolve(contract=other))
    store = saved_by(first, second, first, second)
    states = [zeros_like(each) for each in (first, second, first, second.evolve(contract=other))]
    with pytest.raises(RanksDisagree, match=said):
        run_threads(4, lambda world: load(store, like=states[world.rank], collectives=world))


def test_replicas_of_a_stage_may_have_their_own_devices_and_lists_of_what_is_not_saved():
    """R07: as replicas of a whole model may."""
    states = halves(whole_state()) * 2
    assert saved_by(
        *(
            each.evolve(contract={"unsaved": {"model.p": rank}, "environment.threads": rank})
            for rank, each in enumerate(states)
        )
    ).list("")


def test_a_component_that_only_some_stages_have_is_refused():
    """B06: such as a loader that only the first stage attaches."""
    first, second = halves(whole_state())
    with pytest.raises(RanksDisagree, match=r"components: .*attach the same components on every rank of the pipeline"):
        saved_by(first.evolve(dataset={"n": 1}), second)


def cut_stage(rank, cuts, *, drift=None):
    """Two stages of two ranks each share one weight, which each stage cuts over its ranks; one has a weight of its own beside it."""
    stage, names = rank // 2, ["emb.weight", *(["h.0.weight"] if rank < 2 else [])]
    rule = make_placement(make_mesh((2,), first=2 * stage), cuts[stage])
    box = rule.box((4, 2), (rank % 2,))
    part = torch.arange(8.0).reshape(4, 2)[tuple(slice(low, high) for low, high in box)].clone()
    part[-1, -1] += drift == rank
    params = {name: Shard(part, (4, 2), tuple(low for low, _ in box), not any(cuts[stage]), rule) for name in names}
    return TrainState(ModelState(Leaves(params), Leaves({})), trainer=Progress(step=1), stage=make_stage([stage], 2))


@pytest.mark.parametrize("drift", [None, *range(4)])
def test_a_weight_that_stages_share_is_compared_in_all_its_parts(drift):
    """I05: fully_shard cuts the weight in each stage; the parts of the first rank of each stage were compared, and no others."""
    store, rows = MemoryStore(), [[0], []]
    outcomes = thread_outcomes(
        4, lambda ranks: save(cut_stage(ranks.rank, [rows, rows], drift=drift), store, collectives=ranks)
    )
    if drift is None:
        assert [each.error for each in outcomes] == [None] * 4
        return
    (text,) = {str(each.error) for each in outcomes if isinstance(each.error, RanksDisagree)}
    assert len(outcomes) == 4
    assert text.startswith("model.params['emb.weight']: expected one tensor of this name")
    assert f"bits that rank {drift % 2} has" in text
    assert f"on rank {drift % 2 + 2}" in text


def test_stages_that_cut_a_shared_weight_differently_are_refused():
    """I05: their parts cannot be compared, and which of them is saved would depend on the order of the stages."""
    outcomes = thread_outcomes(
        4, lambda ranks: save(cut_stage(ranks.rank, [[[0], []], [[], [0]]]), MemoryStore(), collectives=ranks)
    )
    assert all(isinstance(each.error, RanksDisagree) for each in outcomes), outcomes
    assert "model.params['emb.weight']: expected the parts that stages cut it into alike" in str(outcomes[3].error)

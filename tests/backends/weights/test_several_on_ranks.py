"""Several sources on several ranks: each rank reads its part of what it has, and what is unused or missing is judged for the whole model."""

import pytest
import torch

from trainfold import attach
from trainfold.backends.ranks.in_process import run_threads
from trainfold.backends.runs.api import save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.weights.plan import planned
from trainfold.core.errors import InvalidArgument, InvalidState, RankFailed, SourceFailed
from trainfold.core.layout.shard import make_shard
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.notes import LINEAGE
from trainfold.core.state.state import ModelState, Progress, TrainState
from trainfold.core.transform.naming import rename
from trainfold.core.weights.source import Wanted
from trainfold.properties.contracts import check_weight_source
from trainfold.weights import (
    ByScript,
    Cast,
    CheckpointWeights,
    FirstRank,
    LoadSpec,
    SeveralSources,
    Transformed,
    WeightServer,
    take_weights,
)

MODEL = {"0.w": torch.arange(8.0).reshape(4, 2), "1.w": torch.arange(8.0).reshape(4, 2) + 10, "head.w": torch.ones(2)}


def run_with(**tensors):
    store = MemoryStore()
    save(TrainState(model=ModelState(Leaves(tensors), Leaves()), trainer=Progress()), store)
    return CheckpointWeights(store)


def sources():
    """Two runs, one with other names and another dtype; the head is the script's."""
    first = run_with(**{"old.w": MODEL["0.w"]})
    second = run_with(**{"1.w": MODEL["1.w"].half()})
    renamed = Transformed(first, rename("old.{name}", "0.{name}"))
    return SeveralSources(
        [LoadSpec(renamed, strict="exact", names="0.{name}"), Cast(second), LoadSpec(ByScript(), names="head.w")]
    )


def state_of(params):
    return TrainState(model=ModelState(Leaves(params), Leaves()), trainer=Progress())


@pytest.mark.parametrize("reads", ["each", "rank 0"])
def test_each_rank_of_a_sharded_state_takes_its_parts_from_the_sources_that_have_them(reads):
    """J04: through a transform, a cast and rank 0 as well as alone."""
    specs = sources().sources

    def taken(world):
        rows = {
            name: make_shard(torch.zeros(2, 2), shape=(4, 2), starts=(2 * world.rank, 0)) for name in ("0.w", "1.w")
        }
        source = SeveralSources(specs)
        if reads == "rank 0":
            source = SeveralSources(
                [LoadSpec(FirstRank(SeveralSources(specs[:2]), world), names=["0.w", "1.w"]), specs[2]]
            )
        return take_weights(state_of({**rows, "head.w": torch.zeros(2)}), source, collectives=world)

    states = run_threads(2, taken)
    for name in ("0.w", "1.w"):
        parts = [each.model.params[name].tensor for each in states]
        assert torch.equal(torch.cat(parts), MODEL[name])
    assert all(torch.equal(each.model.params["head.w"], torch.zeros(2)) for each in states)
    assert states[0].contract[LINEAGE] == states[1].contract[LINEAGE]
    if reads == "each":
        begins = "Transformed(CheckpointWeights('memory:', step=0, component='model'), rename old.{name} -> 0.{name})"
        assert states[0].contract[LINEAGE][0] == [begins, ["0.w"]]


def test_stages_are_judged_as_one_model():
    """V10: what another stage has is not unused, and what no stage has is refused on every rank."""
    mine = [{"0.w": torch.zeros(4, 2)}, {"1.w": torch.zeros(4, 2), "head.w": torch.zeros(2)}]
    specs = sources().sources

    def taken(world):
        state = take_weights(state_of(mine[world.rank]), SeveralSources(specs), collectives=world)
        return {name: each for name, each in state.model.params.items() if name != "head.w"}

    found = run_threads(2, taken)
    assert [list(each) for each in found] == [["0.w"], ["1.w"]]
    assert all(torch.equal(each, MODEL[name]) for part in found for name, each in part.items())

    def refused(world):
        wrong = SeveralSources([*specs[:2], LoadSpec(run_with(**{"head.w": torch.ones(2), "tail.w": torch.ones(2)}))])
        with pytest.raises((InvalidState, RankFailed)) as caught:
            take_weights(state_of(mine[world.rank]), wrong, collectives=world)
        return str(caught.value)

    assert all("expected tensors of the model alone, found tail.w" in each for each in run_threads(2, refused))


def test_ranks_that_have_other_tensors_of_one_model_agree_on_its_sources():
    """I05: stages of a pipeline, each of which wants its own names first, were refused as if they had found other weights."""
    source = run_with(embed=torch.ones(2), head=torch.ones(2))

    def decided(world):
        name = ("embed", "head")[world.rank]
        return planned(source, {name: Wanted("float32", (2,), ((0, 2),))}, world).sources

    one, other = run_threads(2, decided)
    assert one == other
    assert one.keys() == {"embed", "head"}


def test_a_fault_of_one_of_several_sources_names_that_one():
    """J03: it named the list of them alone."""

    class Mine:
        def supply(self, wanted):
            yield from ()
            raise KeyError("no.such")

    source = SeveralSources([LoadSpec(Mine(), names="head.{name}"), LoadSpec(run_with(**{"0.w": MODEL["0.w"]}))])
    state = state_of({name: torch.zeros_like(MODEL[name]) for name in ("0.w", "head.w")})
    with pytest.raises(SourceFailed, match=r"weights from Mine: .*KeyError: 'no.such'"):
        take_weights(state, source)


def test_several_sources_keep_the_contract_of_one():
    """I06: with an overlap that is declared, and a part through a transform."""
    tensors = {"a.w": torch.arange(6.0).reshape(3, 2), "b.w": torch.ones(2), "c.w": torch.zeros(1)}
    first = run_with(**{"old.w": tensors["a.w"], "c.w": torch.ones(1)})
    second = run_with(**{"b.w": tensors["b.w"], "c.w": tensors["c.w"]})
    renamed = Transformed(first, rename("old.{name}", "a.{name}"))
    check_weight_source(lambda: SeveralSources([renamed, LoadSpec(second, overrides=True)]), tensors)


def test_rank_0_looks_at_a_list_before_it_sends_anything_and_the_record_names_the_step():
    """V10: what a list asks of its sources is asked where rank 0 reads for all, and no rank has overwritten a tensor by then. V16: the checkpoint that was read is on record."""
    mine = [{"0.w": torch.zeros(4, 2)}, {"1.w": torch.zeros(4, 2)}]
    good, extra = run_with(**{"0.w": MODEL["0.w"], "1.w": MODEL["1.w"]}), run_with(**{"tail.w": torch.ones(2)})

    def refused(world):
        live = attach(torch.nn.ParameterDict({"0": torch.nn.ParameterDict({"w": torch.zeros(4, 2)})}), weights=FirstRank(SeveralSources([LoadSpec(good, strict="any"), LoadSpec(extra, strict="any")]), world))  # fmt: skip
        with pytest.raises((InvalidState, RankFailed)) as caught:
            live.take_weights(world)
        return str(caught.value), live.capture().model.params["0.w"].sum().item()

    for said, total in run_threads(2, refused):
        assert "found none among 1: tail.w" in said
        assert total == 0

    def taken(world):
        return take_weights(state_of(mine[world.rank]), FirstRank(good, world), collectives=world).contract[LINEAGE]

    begins = "FirstRank(CheckpointWeights('memory:', step=0, component='model'))"
    assert run_threads(2, taken) == [[[begins, ["*.w"]]]] * 2
    for make in (
        lambda source: FirstRank(source, None),
        lambda source: WeightServer(source, token="a token of the test"),
    ):
        with pytest.raises(InvalidArgument, match=r"found ByScript; list it beside: SeveralSources"):
            make(SeveralSources([good, ByScript()]))

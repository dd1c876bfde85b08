"""A state that ranks hold in parts is exported as its checkpoint would be, byte for byte, and whole or not at all."""

import os
import shutil
import signal
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.fsdp2_cases import Model, sharded
from kit.backends.mesh_cases import ALL, shapes, state

import trainfold
from trainfold.backends.ranks.in_process import RankFault, thread_outcomes
from trainfold.backends.stores.local import LocalStore
from trainfold.backends.stores.memory import MemoryStore
from trainfold.backends.weights import held_by_ranks
from trainfold.core.errors import InvalidArgument, InvalidState, RankFailed, RanksDisagree
from trainfold.core.layout.shard import Shard, make_shard
from trainfold.core.layout.stage import make_stage
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, OptimizerState, ParamGroup, Progress, TrainState
from trainfold.ranks import run_threads
from trainfold.transforms import compose, lora, merge, rearrange, rename, view
from trainfold.weights import (
    CheckpointWeights,
    DcpDirectory,
    plan_hub_directory,
    write_adapter_directory,
    write_dcp_directory,
    write_hub_directory,
)

RULES = {
    "as they are": None,
    "renamed and transposed": compose(rename("column", "up.weight"), rearrange(["up.weight", "row"], "o i -> i o")),
    "merged": merge(["column", "embedding"], "both"),
}


def contents(path):
    """Every file of a directory."""
    return {each.name: each.read_bytes() for each in sorted(Path(path).iterdir())}


def values_of(rows, width):
    torch.manual_seed(rows + width)
    found = {role: torch.randn(shape) for role, shape in shapes(rows, width, rows).items()}
    return found | {"row bias": found["row bias"].bfloat16()}


def checkpoint(state_of, world_size):
    """What these ranks save."""
    store = MemoryStore()
    run_threads(world_size, lambda world: trainfold.save(state_of(world.rank), store, collectives=world))
    return CheckpointWeights(store)


@settings(max_examples=7)
@given(
    layout=st.sampled_from(ALL),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    rules=st.sampled_from(list(RULES)),
    dtype=st.sampled_from([None, "float16"]),
    round_bytes=st.sampled_from([8, 64, 1 << 20]),
    shard_bytes=st.sampled_from([None, 100]),
)
def test_a_sharded_state_is_exported_as_its_checkpoint_would_be(
    tmp_path_factory, layout, sizes, rules, dtype, round_bytes, shard_bytes
):
    """J04, K05: whatever cuts it, in parts that are uneven and empty, in rounds of some bytes or of many tensors."""
    values, folder = values_of(*sizes), tmp_path_factory.mktemp("export")
    options = {"rules": RULES[rules], "dtype": dtype, "shard_bytes": shard_bytes}

    def state_of(rank):
        return state(values, layout, rank)

    write_hub_directory(checkpoint(state_of, layout.size), folder / "saved", **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(held_by_ranks, "ROUND_BYTES", round_bytes)
        plans = run_threads(layout.size, lambda world: write_hub_directory(state_of(world.rank), folder / "live", collectives=world, **options))  # fmt: skip
    assert contents(folder / "live") == contents(folder / "saved")
    assert all(each == plans[0] for each in plans)
    assert plan_hub_directory(state_of(0), **options).files == plans[0].files


def halves(world, tensors, **changes):
    """A state whose leaves lie in halves on two ranks."""
    rows = {
        name: make_shard(each[each.shape[0] // 2 * world.rank :][: each.shape[0] // 2 or 1], shape=tuple(each.shape), starts=(each.shape[0] // 2 * world.rank, *[0] * (each.dim() - 1)))
        for name, each in tensors.items()
    }  # fmt: skip
    return TrainState(model=ModelState(Leaves({**rows, **changes}), Leaves()), trainer=Progress())


WEIGHTS = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(8.0).reshape(4, 2) + 50, "c": torch.ones(2)}


def test_small_tensors_come_together_and_large_ones_in_pieces(tmp_path, monkeypatch):
    """A call of the ranks for each of a hundred thousand tensors would take minutes; rank 0 has one tensor, and not a model."""
    asked = []
    give = held_by_ranks._Ranks.give
    monkeypatch.setattr(
        held_by_ranks._Ranks, "give", lambda ranks, parts, *into: (asked.append(parts), give(ranks, parts, *into))[1]
    )
    tensors = {f"small.{number}": torch.full((2, 2), float(number)) for number in range(20)} | {"w": torch.randn(32, 8)}
    monkeypatch.setattr(held_by_ranks, "ROUND_BYTES", 256)
    run_threads(2, lambda world: write_hub_directory(halves(world, tensors), tmp_path / "a", collectives=world))
    of_one = asked[::2]  # each rank of two notes each round
    assert len(of_one) == 2 + 2  # half of the large one is on rank 0
    assert (
        max(sum(4 * (box[0][1] - box[0][0]) * (box[1][1] - box[1][0]) for _, box in parts) for parts in of_one) == 256
    )


def test_stages_of_a_pipeline_are_one_model(tmp_path):
    """As in their checkpoint. A leaf may be cut over the ranks of a stage, too."""
    names = [("embed.weight", "layers.0.weight"), ("layers.1.weight", "head.weight")]

    def state_of(rank):
        mine = {name: torch.full((3, 2), float(len(name)) + rank) for name in names[rank]}
        return TrainState(model=ModelState(Leaves(mine), Leaves()), trainer=Progress(), stage=make_stage([rank], 2))

    write_hub_directory(checkpoint(state_of, 2), tmp_path / "saved")
    run_threads(2, lambda world: write_hub_directory(state_of(world.rank), tmp_path / "live", collectives=world))
    assert contents(tmp_path / "live") == contents(tmp_path / "saved")
    with pytest.raises(InvalidArgument, match="found stage 0 of 2; call it on all ranks"):
        write_hub_directory(state_of(0), tmp_path / "one")


def test_adapters_of_a_sharded_model_are_merged_or_written_alone(tmp_path):
    """K03: a base in parts, the adapter in parts or whole."""
    tensors = {"q.base_layer.weight": torch.randn(4, 6), "q.lora_A.default.weight": torch.randn(2, 6)}
    whole = tensors | {"q.lora_B.default.weight": torch.randn(4, 2)}
    full = TrainState(model=ModelState(Leaves(whole), Leaves()), trainer=Progress())
    options = {"rules": view(lora(alpha=4), "export"), "dtype": "bfloat16"}
    config = {"peft_type": "LORA"}

    def export(world):
        mine = halves(world, tensors, **{"q.lora_B.default.weight": whole["q.lora_B.default.weight"]})
        write_hub_directory(mine, tmp_path / "live", collectives=world, **options)
        write_adapter_directory(mine, tmp_path / "adapter", config=config, collectives=world)

    run_threads(2, export)
    write_hub_directory(full, tmp_path / "whole", **options)
    write_adapter_directory(full, tmp_path / "whole adapter", config=config)
    assert contents(tmp_path / "live") == contents(tmp_path / "whole")
    assert contents(tmp_path / "adapter") == contents(tmp_path / "whole adapter")


def test_a_rank_that_calls_alone_is_refused_with_both_ways_out(tmp_path):
    """Before anything is written; a state whose one rank has all of it is not cut."""
    with pytest.raises(
        InvalidArgument, match="the part that this rank has of a; call it on all ranks, with collectives="
    ):
        run_threads(2, lambda world: write_hub_directory(halves(world, WEIGHTS), tmp_path / "a"))
    assert not list(tmp_path.iterdir())
    one = make_shard(WEIGHTS["a"], shape=(4, 6), starts=(0, 0))
    write_hub_directory(TrainState(model=ModelState(Leaves({"a": one}), Leaves()), trainer=Progress()), tmp_path / "a")


def test_ranks_with_other_tensors_are_refused(tmp_path):
    """As in a save."""
    with pytest.raises(RanksDisagree, match="d"):
        run_threads(2, lambda world: write_hub_directory(halves(world, WEIGHTS, **{"d": torch.ones(2)} if world.rank else {}), tmp_path / "a", collectives=world))  # fmt: skip


def test_a_write_on_another_rank_is_an_error_on_all_and_nothing_is_published(tmp_path, monkeypatch):
    """D11."""
    monkeypatch.setattr(held_by_ranks, "ROUND_BYTES", 64)
    give, states = held_by_ranks._Ranks.give, {}

    def and_write(ranks, parts, *into):
        give(ranks, parts, *into)
        if ranks._world.rank:
            states[1].model.params["c"].tensor.add_(1)

    monkeypatch.setattr(held_by_ranks._Ranks, "give", and_write)

    def export(world):
        states[world.rank] = halves(world, {name: each.clone() for name, each in WEIGHTS.items()})
        write_hub_directory(states[world.rank], tmp_path / "a", collectives=world)

    errors = [each.error for each in thread_outcomes(2, export)]
    assert [type(each) for each in errors] == [RankFailed, InvalidState]
    assert "weights: c: expected the values that it had at the call" in str(errors[0])
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_any_call_leaves_nothing_that_looks_whole(tmp_path, rank, monkeypatch):
    """J03: every rank ends with an error, and the same call then writes all."""
    monkeypatch.setattr(held_by_ranks, "ROUND_BYTES", 96)

    def export(world, name):
        write_hub_directory(halves(world, WEIGHTS), tmp_path / name, collectives=world)
        return len(world.schedule)

    calls = run_threads(2, lambda world: export(world, "whole"))[rank]
    for index in range(calls):
        is_silent = index % 5 == 1 and index < calls - 2
        fault = RankFault(rank, index, silent=is_silent)
        patience = 0.2 if is_silent else 60.0  # a silent rank is waited for; on a busy machine so is any other
        outcomes = thread_outcomes(2, lambda world: export(world, "a"), fail_at=fault, timeout_secs=patience)
        assert any(each.error is not None for each in outcomes)
        if index < calls - 2:  # after the commit it is whole
            assert all(each.error is not None for each in outcomes)
            assert not (tmp_path / "a").exists()
            run_threads(2, lambda world: export(world, "a"))
        assert contents(tmp_path / "a") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "a")


def test_an_error_of_the_disk_ends_all_ranks(tmp_path):
    """What rank 0 cannot write, the others do not wait for."""
    (tmp_path / "a").write_text("in the way")
    outcomes = thread_outcomes(2, lambda world: write_hub_directory(halves(world, WEIGHTS), tmp_path / "a", collectives=world), timeout_secs=5)  # fmt: skip
    assert [type(each.error) for each in outcomes] == [InvalidArgument, RankFailed]


def with_adamw(state_, scale=1):
    """The same state, and an optimizer whose slots are cut as the parameters are."""

    def slot(leaf):
        return attrs.evolve(leaf, tensor=leaf.tensor * 2 * scale) if isinstance(leaf, Shard) else leaf * 2 * scale

    slots = {
        name: {"exp_avg": slot(leaf), "step": torch.tensor(3.0)}
        for name, leaf in state_.model.params.items()
        if leaf.shape
    }
    group = ParamGroup({"lr": 0.1, "betas": (0.9, 0.99)}, tuple(slots))
    return state_.evolve(
        optimizer=OptimizerState("adamw", Leaves(slots), (group,), None), trainer=Progress(step=3, samples=12)
    )


@settings(max_examples=5)
@given(
    layout=st.sampled_from(ALL),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    round_bytes=st.sampled_from([8, 64, 1 << 20]),
    file_bytes=st.sampled_from([200, 1 << 30]),
    key=st.sampled_from(["model", ""]),
)
def test_a_sharded_state_is_a_directory_of_torch_as_the_whole_one_would_be(
    tmp_path_factory, layout, sizes, round_bytes, file_bytes, key
):
    """J04, M24: model, slots, groups and step, to the byte; and the model alone as its checkpoint would be."""
    values, folder = values_of(*sizes), tmp_path_factory.mktemp("dcp")
    options = {"file_bytes": file_bytes, "model": key}

    def state_of(rank):
        return with_adamw(state(values, layout, rank))

    whole = TrainState(model=ModelState(Leaves(values), Leaves()))
    write_dcp_directory(folder / "whole", with_adamw(whole), **options)
    saved = checkpoint(lambda rank: state(values, layout, rank), layout.size)
    write_dcp_directory(folder / "saved", saved, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(held_by_ranks, "ROUND_BYTES", round_bytes)
        run_threads(layout.size, lambda world: write_dcp_directory(folder / "live", state_of(world.rank), collectives=world, **options))  # fmt: skip
        run_threads(layout.size, lambda world: write_dcp_directory(folder / "model", state_of(world.rank).evolve(optimizer=None, trainer=None), collectives=world, **options))  # fmt: skip
    found = DcpDirectory(folder / "live")
    assert found.objects()["step"] == 3
    assert contents(folder / "live") == contents(folder / "whole")
    assert contents(folder / "model") == contents(folder / "saved")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_leaves_no_directory_of_torch(tmp_path, rank, monkeypatch):
    """J03: every rank ends with an error, and the same call then writes all."""
    monkeypatch.setattr(held_by_ranks, "ROUND_BYTES", 96)

    def export(world, name):
        write_dcp_directory(tmp_path / name, with_adamw(halves(world, WEIGHTS)), collectives=world)
        return len(world.schedule)

    calls = run_threads(2, lambda world: export(world, "whole"))[rank]
    for index in range(0, calls - 2, 3):
        is_silent = index % 5 == 1 and index < calls - 2
        fault = RankFault(rank, index, silent=is_silent)
        patience = 0.2 if is_silent else 60.0  # a silent rank is waited for; on a busy machine so is any other
        outcomes = thread_outcomes(2, lambda world: export(world, "a"), fail_at=fault, timeout_secs=patience)
        assert all(each.error is not None for each in outcomes)
        assert not (tmp_path / "a").exists()
    run_threads(2, lambda world: export(world, "a"))
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


def test_what_torch_has_no_place_for_is_refused_on_all_ranks(tmp_path):
    """K09: fp32 masters on one rank, an optimizer on one of two stages, a call of one rank alone, and a slot with the name of a weight."""

    def masters(world):
        mine = with_adamw(halves(world, WEIGHTS))
        odd = attrs.evolve(mine.optimizer, masters=mine.model.params) if world.rank else mine.optimizer
        write_dcp_directory(tmp_path / "a", mine.evolve(optimizer=odd), collectives=world)

    def stages(world):
        mine = TrainState(model=ModelState(Leaves({f"{world.rank}.w": torch.ones(2)}), Leaves()))
        mine = (mine if world.rank else with_adamw(mine)).evolve(stage=make_stage([world.rank], 2))
        write_dcp_directory(tmp_path / "a", mine, collectives=world)

    def alone(world):
        write_dcp_directory(tmp_path / "a", with_adamw(halves(world, WEIGHTS)))

    errors = [sorted(type(each.error).__name__ for each in thread_outcomes(2, call, timeout_secs=5)) for call in (masters, stages, alone)]  # fmt: skip
    assert errors == [["InvalidState", "RankFailed"], ["RanksDisagree"] * 2, ["InvalidArgument"] * 2]
    odd = TrainState(model=ModelState(Leaves({"a": torch.ones(2), "optim.state.a.exp_avg": torch.ones(2)}), Leaves()))
    with pytest.raises(InvalidArgument, match=r"optimizer: expected a key that no tensor .* found optim.state.a.exp_avg"):  # fmt: skip
        write_dcp_directory(tmp_path / "a", with_adamw(odd))
    assert not (tmp_path / "a").exists()


def on_ranks(collectives, folder):
    """Export a model that FSDP2 has sharded, while it is attached, and its checkpoint."""
    live = trainfold.attach(sharded(collectives.world_size, seed=5))
    options = {"rules": RULES_OF_MODEL, "dtype": "bfloat16", "collectives": collectives}
    write_hub_directory(live.capture(), f"{folder}/live", **options)
    trainfold.save(live.capture(), LocalStore(f"{folder}/run"), collectives=collectives)
    write_hub_directory(CheckpointWeights(f"{folder}/run"), f"{folder}/saved", **options)
    assert contents(f"{folder}/live") == contents(f"{folder}/saved")
    with torch.no_grad():
        optimizer = torch.optim.SGD(live.attached()["model"].parameters(), lr=0.1)
    state = live.capture()
    give = held_by_ranks._Ranks.give

    def and_step(ranks, parts, *into):
        give(ranks, parts, *into)
        for each in optimizer.param_groups[0]["params"]:
            each.grad = torch.ones_like(each)
        optimizer.step()

    held_by_ranks._Ranks.give = and_step
    try:
        write_hub_directory(state, f"{folder}/written to", collectives=collectives)
    except (InvalidState, RankFailed) as error:
        return type(error).__name__
    finally:
        held_by_ranks._Ranks.give = give


RULES_OF_MODEL = compose(rename("first.weight", "up.weight"), rearrange("up.weight", "o i -> i o"))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_fsdp2_has_sharded_is_exported_in_place(processes, tmp_path, world_size):
    """J04, D11: as the checkpoint would be; and a step of the optimizer meanwhile is seen on every rank."""
    assert set(processes.run(world_size, on_ranks, str(tmp_path), collectives={})) == {"InvalidState"}
    assert not (tmp_path / "written to").exists()
    tensors = trainfold.weights.HubDirectory(tmp_path / "live").specs()
    assert {name: each.shape for name, each in tensors.items()} == {
        name.replace("first.weight", "up.weight"): tuple(each.shape) if name != "first.weight" else tuple(each.shape)[::-1]
        for name, each in Model().state_dict().items()
    }  # fmt: skip


def dying(collectives, folder, rank):
    """Export, and kill a rank in the second round."""
    live = trainfold.attach(sharded(collectives.world_size, seed=5))
    held_by_ranks.ROUND_BYTES = 100
    give, rounds = held_by_ranks._Ranks.give, []

    def and_die(ranks, parts, *into):
        rounds.append(parts)
        if len(rounds) == 2 and collectives.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return give(ranks, parts, *into)

    held_by_ranks._Ranks.give = and_die
    write_hub_directory(live.capture(), f"{folder}/hub", collectives=collectives)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_leaves_no_directory_and_no_rank_that_waits(processes, tmp_path, rank):
    """J03: the others name it."""
    ended = processes.outcomes(2, dying, str(tmp_path), rank, collectives={"timeout_secs": 6.0, "grace_secs": 1.0})
    assert ended[rank].code == -signal.SIGKILL
    assert ended[1 - rank].error == "RankFailed"
    assert f"rank {rank}" in ended[1 - rank].text
    assert not (tmp_path / "hub").exists()

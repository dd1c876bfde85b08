"""What several ranks cannot save or resume exactly is refused by name: parts that look whole, replicas that differ, another world size."""

import itertools

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import PATIENT, disagreements, refusal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import trainfold
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import SingleProcess, run_threads, thread_outcomes
from trainfold.backends.ranks.launcher import ranks_around
from trainfold.backends.runs.api import load, plan, save
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import (
    InvalidArgument,
    RanksDisagree,
    ResumeRefused,
)
from trainfold.core.format.fingerprint import fingerprint
from trainfold.core.metrics.moments import Sum
from trainfold.core.state.leaves import Leaves
from trainfold.core.state.state import ModelState, Opaque, Progress, TrainState

pytestmark = pytest.mark.slow(0.5)

FRESH = trainfold.retention.make_best_record(metric="loss", direction="min")


def state_at(step, *, shift=0.0, mean=0.0, slot=0.0, **components):
    params = {"a": torch.arange(4.0), "b": torch.arange(3.0) + shift}
    buffers = {"bn.running_mean": torch.full((2,), mean), "bn.running_var": torch.ones(2)}
    model = ModelState(params=Leaves(params), buffers=Leaves(buffers), ties=())
    extra = {"ema": {"a": torch.full((2,), slot)}}
    return TrainState(model=model, trainer=Progress(step=step), extra=extra, **components)


@pytest.mark.parametrize(
    ("drift", "where", "cure"),
    [
        ({"shift": 1e-7}, "model.params['b']", "DistributedDataParallel"),
        ({"mean": 0.5}, "model.buffers['bn.running_mean']", "convert_sync_batchnorm"),
        ({"slot": -0.0}, "ema['a']", "same values"),
        ({"slot": 1.0}, "ema['a']", "stage of a pipeline"),
    ],
)
def test_replicas_that_differ_in_a_bit_are_refused_on_every_rank_naming_the_leaf(drift, where, cure):
    """W24, B06: otherwise one rank would write the mean and another the variance. A zero with another sign has another bit."""
    store = MemoryStore()
    outcomes = thread_outcomes(
        3, lambda world: save(state_at(1, **(drift if world.rank == 2 else {})), store, collectives=world)
    )
    text = disagreements(outcomes)
    assert text.startswith(f"{where}: expected the bits of rank 0")
    assert "on rank 2" in text
    assert cure in text
    assert "manifest.json" not in store.list("step-00000001"), "nothing is committed"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_manager_compares_all_at_its_first_save_and_what_drifts_at_each(mode):
    """W24: batch statistics, and everything that DDP does not keep equal, may start to differ after the first save."""
    store = MemoryStore()

    def work(world, drift, step):
        with CheckpointManager(store, mode=mode, collectives=world, start_over=True) as manager:
            manager.save(state_at(step))
            manager.drain()
            manager.save(state_at(step + 1, **(drift if world.rank == 1 else {})))
            manager.drain()

    text = disagreements(thread_outcomes(2, lambda world: work(world, {"mean": 1.0}, 1)))
    assert text.startswith("model.buffers['bn.running_mean']")
    text = disagreements(thread_outcomes(2, lambda world: work(world, {"shift": 1.0}, 3)))
    assert text.startswith("model.params['b']")


def test_a_failed_first_save_is_no_proof():
    store = MemoryStore()

    def work(world):
        with CheckpointManager(store, collectives=world) as manager:
            found = []
            for _ in range(2):
                try:
                    manager.save(state_at(1, shift=float(world.rank)))
                except RanksDisagree as error:
                    found.append(error.where)
            manager.save(state_at(2))
            return found

    assert run_threads(2, work) == [["model.params['b']"] * 2] * 2


@given(
    world_size=st.integers(1, 4),
    drifts=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["shift", "mean", "slot"])), max_size=2),
)
def test_a_save_of_ranks_succeeds_if_and_only_if_they_are_replicas(world_size, drifts):
    """B06: any ranks may differ, and in any leaf."""
    values = {rank: {name: 1.0 for each, name in drifts if each == rank} for rank in range(world_size)}
    store = MemoryStore()
    outcomes = thread_outcomes(
        world_size, lambda world: save(state_at(1, **values[world.rank]), store, collectives=world)
    )
    if all(values[rank] == values[0] for rank in range(world_size)):
        assert fingerprint(load(store, like=state_at(0))) == fingerprint(state_at(1, **values[0]))
    else:
        disagreements(outcomes)


@pytest.mark.parametrize(("first", "other"), [("a", "b"), (1, True), (1, None), (0.0, -0.0)])
def test_contracts_that_differ_are_refused_naming_the_key(first, other):
    """W24: rank 0's contract used to be saved, and every other rank was refused at the resume."""
    store = MemoryStore()
    values = [{"tokenizer": first}, {"tokenizer": other}]
    text = disagreements(
        thread_outcomes(2, lambda world: save(state_at(1), store, contract=values[world.rank], collectives=world))
    )
    assert "contract['tokenizer']" in text
    assert repr(other) in text
    values = [{"environment.threads": 1}, {"environment.threads": 2}]
    run_threads(2, lambda world: save(state_at(2), store, contract=values[world.rank], collectives=world))


# --- random streams and positions in another world --------------------------------------------------------------------


def captured(rank, batches):
    """Like a run with random streams of its own kind on each rank, and a position in its share of the data."""
    streams = Opaque({"torch": torch.full((8,), rank, dtype=torch.uint8)})
    order = {"order": torch.full((8,), rank, dtype=torch.uint8)} if batches else {"order": None}
    return {"rng": streams, "dataset": Opaque({"kind": "map", "epoch": 1, "batches": batches, **order})}


@given(before=st.integers(1, 4), after=st.integers(1, 4), batches=st.integers(0, 2))
def test_streams_and_positions_of_ranks_come_back_to_their_rank_or_are_refused(before, after, batches):
    """H02, H03, G05, G06, P12: a world of one has no streams for others either; a position at an epoch's end fits every world."""
    store = MemoryStore()
    run_threads(before, lambda ranks: save(state_at(1, **captured(ranks.rank, batches)), store, collectives=ranks))

    def resume(ranks, **options):
        return load(store, like=state_at(0, **captured(9, 0)), collectives=ranks, **options)

    if before == after:
        for rank, found in enumerate(run_threads(after, resume)):
            wanted = captured(rank, batches)
            assert torch.equal(found.rng.value["torch"], wanted["rng"].value["torch"])
            assert found.dataset.value["batches"] == batches
            assert batches == 0 or torch.equal(found.dataset.value["order"], wanted["dataset"].value["order"])
        return
    outcomes = thread_outcomes(after, resume)
    assert all(isinstance(outcome.error, ResumeRefused) for outcome in outcomes)
    text = str(outcomes[0].error)
    assert f"random streams of {before} rank{'s' if before > 1 else ''}" in text
    assert ("data_ranks" in text) == (batches > 0)
    reset = {"rng": "another world", **({"dataset": "restart the epoch"} if batches else {})}
    for found in run_threads(after, lambda ranks: resume(ranks, reset=reset)):
        assert found.rng.value["torch"][0] == 9, "its own, which the script has made"
        assert found.dataset.value["epoch"] == 1


def test_the_refusal_of_another_world_names_the_way_out():
    store = MemoryStore()
    run_threads(2, lambda ranks: save(state_at(1, **captured(ranks.rank, 3)), store, collectives=ranks))
    text = str(plan(store, like=state_at(0, **captured(0, 0))))
    assert 'reset={"rng": "why"}' in text
    assert 'reset={"dataset": "why"}' in text
    found = plan(store, like=state_at(0, **captured(0, 0)), policy={"per_rank": "adapt", "data_ranks": "adapt"})
    assert {action.name: action.verb for action in found.actions}["dataset"] == "keep"


# --- a manager that knows nothing of its ranks ------------------------------------------------------------------------


def test_a_manager_under_a_launcher_wants_to_know_its_ranks(monkeypatch, tmp_path):
    """Otherwise four processes of torchrun would each save a separate run into the same directory."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with CheckpointManager(tmp_path / "no-launcher"):
        pass  # some clusters set it for other reasons; a launcher also sets the rank
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidArgument, match=r"WORLD_SIZE=4.*TorchCollectives\(\).*SingleProcess\(\)"):
        CheckpointManager(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with CheckpointManager(tmp_path / "run", collectives=trainfold.SingleProcess()) as manager:
        manager.save(state_at(1))
    for size, wanted in (("1", None), ("many", None), ("", None), ("2", "WORLD_SIZE=2 in the environment")):
        assert ranks_around({"RANK": "0", "WORLD_SIZE": size}) == wanted


ALONE = {
    "save": lambda run, **ranks: save(state_at(1), run, **ranks),
    "load": lambda run, **ranks: load(run, like=state_at(0), **ranks),
    "evaluate": lambda run, **ranks: trainfold.evaluate(lambda x: {"n": x}, [torch.ones(3)], {"n": Sum()}, **ranks),
    "save_best": lambda run, **ranks: trainfold.retention.save_best(
        run, attrs.evolve(FRESH, score=0.5, step=1), **ranks
    ),
    "load_best": lambda run, **ranks: trainfold.retention.load_best(run, FRESH, **ranks),
    "DisabledManager": lambda run, **ranks: trainfold.DisabledManager(**ranks).finish(state_at(1)),
}


@pytest.mark.parametrize("name", ALONE)
def test_whatever_concerns_a_run_wants_to_know_its_ranks(name, monkeypatch):
    """W24: otherwise each rank would overwrite the others' checkpoint, choose another newest one, or return the result of its own share."""
    store = MemoryStore()
    save(state_at(1), store)
    ALONE[name](store)
    monkeypatch.setenv("WORLD_SIZE", "4")
    ALONE[name](store)  # some clusters set it for other reasons
    monkeypatch.setenv("RANK", "0")
    before = sorted(store.list("step-00000001"))
    with pytest.raises(
        InvalidArgument, match=rf"{name}.collectives: .*WORLD_SIZE=4.*TorchCollectives\(\).*SingleProcess\(\)"
    ):
        ALONE[name](store)
    assert sorted(store.list("step-00000001")) == before
    ALONE[name](store, collectives=SingleProcess())


# --- real ranks -------------------------------------------------------------------------------------------------------


def refused_by_two(collectives, folder):
    """Everything that used to be saved silently, with two real ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    rank, errors = collectives.rank, {}

    def saved(name, model):
        live = attach(model)
        live.advance(samples=1)
        return refusal(lambda: save(live.capture(), f"{folder}/{name}", collectives=collectives))

    torch.manual_seed(0)
    for use_orig_params in (False, True):
        sharded = FullyShardedDataParallel(
            nn.Linear(6, 5), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        errors[f"fsdp {use_orig_params}"] = refusal(lambda sharded=sharded: attach(sharded))
        errors[f"fsdp inside {use_orig_params}"] = refusal(lambda sharded=sharded: attach(sharded.module))
        model = nn.Linear(1, 1)
        errors[f"fsdp extra {use_orig_params}"] = refusal(
            lambda sharded=sharded, model=model: attach(model, extra={"ema": sharded})
        )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    errors["fsdp2"] = refusal(lambda: attach(torch.distributed.fsdp.fully_shard(nn.Linear(6, 5), mesh=mesh)))
    for name, shard in (
        (
            "fsdp late",
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
        ),
        ("fsdp2 late", lambda model: torch.distributed.fsdp.fully_shard(model, mesh=mesh)),
    ):
        late = nn.Linear(6, 5)
        live = attach(late)
        shard(late)
        with CheckpointManager(f"{folder}/{name}", collectives=collectives) as manager:
            errors[name] = refusal(lambda live=live, manager=manager: manager.save(live))
    model = DistributedDataParallel(nn.Linear(6, 5))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    errors["zero"] = refusal(lambda: attach(model, zero))

    torch.manual_seed(rank)
    errors["stages"] = saved("stages", nn.ModuleList([nn.Linear(4, 4)]))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))
    errors["statistics"] = saved("statistics", model)
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
    errors["statistics sent"] = saved("statistics", model)

    errors["save alone"] = refusal(lambda: save(state_at(1), f"{folder}/save-alone"))
    errors["evaluate alone"] = refusal(lambda: trainfold.evaluate(lambda x: {"n": x}, [torch.ones(3)], {"n": Sum()}))
    errors["no collectives"] = refusal(lambda: CheckpointManager(f"{folder}/alone"))
    with CheckpointManager(f"{folder}/alone-{rank}", collectives=SingleProcess()) as manager:
        errors["alone on purpose"] = refusal(lambda: manager.save(state_at(rank)))
    torch.distributed.barrier()
    return errors


def test_what_real_ranks_saved_in_silence_is_refused_by_name(processes, tmp_path):
    """W24: FSDP1 (half of the elements), ZeRO (empty slots), stages with one name, BatchNorm, and a manager without its ranks."""
    found = processes.run(2, refused_by_two, str(tmp_path), collectives=PATIENT)
    for errors in found:
        for orig in (False, True):
            assert "attach.model: expected a module whose parameters are whole" in errors[f"fsdp {orig}"]
            assert "flat parameter" in errors[f"fsdp inside {orig}"]
            assert "extra['ema']" in errors[f"fsdp extra {orig}"]
        assert errors["fsdp2"] == errors["fsdp2 late"] == "nothing", "each rank saves its own part"
        assert "flat parameter" in errors["fsdp late"], "also where it is wrapped after it was attached"
        assert "ZeroRedundancyOptimizer" in errors["zero"]
        assert errors["stages"].startswith("RanksDisagree: model.params['0.weight']")
        assert "stage of a pipeline" in errors["stages"]
        assert errors["statistics"].startswith("RanksDisagree: model.buffers['1.running_mean']")
        assert "convert_sync_batchnorm" in errors["statistics"]
        assert errors["statistics sent"] == errors["alone on purpose"] == "nothing"
        for name in ("no collectives", "save alone", "evaluate alone"):
            assert "torch.distributed with 2 ranks" in errors[name]


def train_until(collectives, run, mode, steps):
    """Each rank has its own dropout masks and its share of the data; the gradients are those of all ranks."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 3))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, seed=3))
    torch.manual_seed(1 + collectives.rank)
    live = attach(model, optimizer, loader=loader)
    with CheckpointManager(run, every=4, mode=mode, collectives=collectives) as manager:
        manager.restore(live)
        for (x,) in live.batches(epochs=2, steps=steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance()
            manager.step(live)
        manager.finish(live)
    found = fingerprint(live.capture().evolve(rng=None))
    return found, torch.rand(4).tolist()


def resume_in_an_epoch(collectives, folder):
    seen = []
    for mode in ("sync", "async"):
        whole = train_until(collectives, f"{folder}/{mode}-whole", mode, None)
        for steps in (4, 8, None):  # an epoch has 6
            parts = train_until(collectives, f"{folder}/{mode}-parts", mode, steps)
        seen.append((whole, parts))
    return seen


def test_real_ranks_go_on_with_the_bits_and_the_masks_of_each(processes, tmp_path):
    """H02, G05: inside an epoch, in both modes; every rank has its own streams and its own share. Each async manager has its own group."""
    ranks = processes.run(2, resume_in_an_epoch, str(tmp_path), collectives=PATIENT)
    for whole, parts in itertools.chain(*ranks):
        assert parts == whole
    ((first, one), _), ((second, other), _) = (seen[0] for seen in ranks)
    assert (first["model"], first["optimizer"]) == (second["model"], second["optimizer"])
    assert one != other, "a rank's streams are its own"


def train(collectives, run, *, epochs=1, steps=None, **reset):
    """A loop as in torch's tutorials; returns which samples a rank has seen."""
    data = TensorDataset(torch.arange(24.0).view(24, 1))
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(collectives.rank)  # as for dropout
    rank, size = collectives.rank, collectives.world_size
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True, seed=3)
    live = attach(model, optimizer, loader=DataLoader(data, batch_size=2, sampler=sampler))
    seen = []
    with CheckpointManager(run, every=1, collectives=collectives) as manager:
        manager.restore(live, reset=reset or None)
        for (x,) in live.batches(epochs=epochs, steps=steps):
            seen += x.flatten().int().tolist()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.advance()
            manager.step(live)
    return seen


def train_in_worlds(collectives, run):
    """Two ranks stop inside an epoch; three try to continue and are refused; two continue to its end; then three continue."""
    group = torch.distributed.new_group([0, 1])
    pair = trainfold.TorchCollectives(group, **PATIENT) if collectives.rank < 2 else None
    first = [] if pair is None else train(pair, run, steps=2)
    collectives.barrier(timeout_secs=60)
    errors = refusal(lambda: train(collectives, run))
    collectives.barrier(timeout_secs=60)
    first += [] if pair is None else train(pair, run)
    collectives.barrier(timeout_secs=60)
    return first, errors, train(collectives, run, epochs=2)


def test_a_distributed_sampler_in_another_world_is_refused_inside_of_an_epoch_and_goes_on_at_its_end(
    processes, tmp_path
):
    """G06, P12: otherwise 4 of 16 samples would be read twice, and 4 never. The same world continues where it stopped."""
    found = processes.run(3, train_in_worlds, str(tmp_path / "run"), collectives=PATIENT)
    firsts, errors, seconds = zip(*found, strict=True)
    assert all(text.startswith("ResumeRefused") and "data_ranks" in text for text in errors)
    assert sorted(itertools.chain(*firsts)) == list(range(24))
    assert sorted(itertools.chain(*seconds)) == list(range(24))


# --- batch statistics under DDP ---------------------------------------------------------------------------------------

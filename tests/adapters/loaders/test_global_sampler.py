"""A sampler whose position is counted over all ranks: any number of ranks continues from it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.system.rank_refusals_cases import PATIENT
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.derived_streams import derive_streams
from trainfold.backends.ranks.in_process import run_threads, thread_outcomes
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import InvalidArgument, RankFailed, RestoreRefused, ResumeRefused

N = 41


def read(store, world, *, steps, batch_size=8, torchs=False, epochs=1, **options):
    """The samples that a rank reads up to a step, and the count of samples; it saves where it stops."""
    data = TensorDataset(torch.arange(N))
    if torchs:
        ranks = {"num_replicas": world.world_size, "rank": world.rank}
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, **ranks))
    else:
        sampler = GlobalBatchSampler(data, batch_size, rank=world.rank, replicas=world.world_size, **options)
        loader = DataLoader(data, batch_sampler=sampler)
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    live = attach(model, loader=loader)
    seen = []
    with CheckpointManager(store, collectives=world, policy={"batch_size": "adapt"}) as manager:
        manager.restore(live)
        for (x,) in live.batches(epochs=epochs, steps=steps):
            seen.append(x.tolist())
            live.advance(samples=len(x))
        if seen:
            manager.save(live)
    return seen, live.progress


def flat(outcomes):
    return [sample for seen, _ in outcomes for batch in seen for sample in batch]


@settings(max_examples=20, deadline=None)
@given(worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=4))
def test_each_sample_is_read_exactly_once_whatever_worlds_the_run_is_resumed_on(worlds):
    """G06, G02: saved and restored by managers; a world too large for what is left in the epoch is refused, and reads nothing."""
    store, found, step = MemoryStore(), [], 0
    for size, more, steps in [*worlds, (1, 4, 99)]:
        outcomes = thread_outcomes(
            size,
            lambda world, upto=step + steps, more=more: read(
                store, world, steps=upto, batch_size=world.world_size + more
            ),
        )
        if any(isinstance(outcome.error, RestoreRefused | RankFailed) for outcome in outcomes):
            assert "samples left in the epoch" in "".join(str(outcome.error) for outcome in outcomes)
            continue
        assert not any(outcome.error for outcome in outcomes), outcomes
        values = [outcome.value for outcome in outcomes]
        found += flat(values)
        (progress,) = {now for _, now in values}
        assert progress.samples == len(found)
        step = progress.step
        if progress.epoch:
            break
    assert sorted(found) == list(range(N))


def test_as_many_ranks_read_the_batches_of_a_run_without_an_interruption():
    """G01: also after the number of ranks has changed in the same epoch, from a place inside a batch of this world."""
    parts, whole = MemoryStore(), MemoryStore()
    for store in (parts, whole):
        run_threads(2, lambda world, store=store: read(store, world, steps=2, batch_size=5))
    first = run_threads(3, lambda world: read(parts, world, steps=3))
    second = run_threads(3, lambda world: read(parts, world, steps=99))
    uninterrupted = run_threads(3, lambda world: read(whole, world, steps=99))
    resumed = [one + other for (one, _), (other, _) in zip(first, second, strict=True)]
    assert [len(seen) for seen, _ in first] == [1, 1, 1]
    assert resumed == [seen for seen, _ in uninterrupted]
    assert [progress for _, progress in second] == [progress for _, progress in uninterrupted]


def test_the_sampler_of_torch_is_refused_on_another_number_of_ranks_with_this_one_as_the_fix():
    """G06: three ranks cannot continue from half of the shares of two."""
    store = MemoryStore()
    counts = run_threads(2, lambda world: read(store, world, steps=2, torchs=True))
    assert [progress.samples for _, progress in counts] == [8, 8], "samples count over the ranks"
    outcomes = thread_outcomes(3, lambda world: read(store, world, steps=4, torchs=True))
    assert all(isinstance(each.error, ResumeRefused) for each in outcomes)
    assert "trainfold.data.GlobalBatchSampler continues on any number of ranks" in str(outcomes[0].error)


def test_a_batch_counts_the_samples_of_all_ranks_also_where_the_loop_passes_them():
    """A rank that passes its own samples, and one that passes the sum, count the same."""
    data = TensorDataset(torch.arange(10))

    def count(world, samples):
        sampler = GlobalBatchSampler(data, 7, rank=world.rank, replicas=2)
        live = attach(torch.nn.Linear(1, 1), loader=DataLoader(data, batch_sampler=sampler))
        for (x,) in live.batches(epochs=1):
            live.advance(samples={"own": len(x), "sum": (7, 3)[live.progress.step], "none": None}[samples])
        return live.progress.samples

    for samples in ("own", "sum", "none"):
        assert run_threads(2, lambda world, samples=samples: count(world, samples)) == [10, 10]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("samples", ["own", "sum", "none"])
def test_a_loader_with_a_state_counts_the_samples_of_all_ranks_too(samples):
    """P12: with torchdata's sampler of a share, which makes all shares equally long."""

    def count(world):
        sampler = StatefulDistributedSampler(range(10), num_replicas=2, rank=world.rank)
        live = attach(torch.nn.Linear(1, 1), loader=StatefulDataLoader(range(10), batch_size=2, sampler=sampler))
        for x in live.batches(epochs=1):
            live.advance(samples={"own": len(x), "sum": 2 * len(x), "none": None}[samples])
        return live.progress.samples

    assert run_threads(2, count) == [10, 10]


def test_another_seed_inside_an_epoch_is_refused_and_at_its_end_it_is_a_drift():
    store = MemoryStore()
    run_threads(1, lambda world: read(store, world, steps=2))
    with pytest.raises(ResumeRefused, match="sampler_settings"):
        run_threads(1, lambda world: read(store, world, steps=3, seed=1))


def test_several_ranks_that_are_not_known_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="WORLD_SIZE=2"):
        GlobalBatchSampler(range(8), 4)
    assert len(GlobalBatchSampler(range(8), 4, rank=1, replicas=2)) == 2
    with pytest.raises(InvalidArgument, match="both rank= and replicas="):
        GlobalBatchSampler(range(8), 4, rank=1)


def test_batches_of_all_ranks_are_refused_as_samples_of_one():
    """G06: torch takes it as sampler= with batch_size=None; then neither samples were counted over the ranks, nor could another number of them continue."""
    loader = DataLoader(range(8), batch_size=None, sampler=GlobalBatchSampler(range(8), 4, rank=0, replicas=2))
    with pytest.raises(InvalidArgument, match=r"expected a GlobalBatchSampler as batch_sampler="):
        attach(torch.nn.Flatten(), loader=loader)


def train_under_ddp(collectives, folder, steps, workers):
    """What a rank reads under DistributedDataParallel; the sampler takes its share from torch.distributed."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    data = TensorDataset(torch.arange(float(N)).unsqueeze(1))
    loader = DataLoader(data, batch_sampler=GlobalBatchSampler(data, 8, seed=5), num_workers=workers)
    live = attach(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader=loader)
    seen = []
    with CheckpointManager(folder, collectives=collectives) as manager:
        manager.restore(live)
        seeds = torch.initial_seed()
        for (x,) in live.batches(epochs=1, steps=steps):
            model(x).sum().backward()
            live.optimizers["optimizer"].step()
            model.zero_grad()
            seen += x.flatten().tolist()
            live.advance()
        manager.save(live)
    return seen, live.progress.samples, seeds


def derived(seed, step, rank):
    generator = torch.Generator()
    generator.set_state(derive_streams(seed, step=step, rank=rank)["torch"])
    return generator.initial_seed()


def test_real_ranks_hand_an_epoch_over_to_more_and_to_fewer(processes, tmp_path):
    """G06: nothing is repeated or lost, where the sampler of torch used to do both after a change of the world."""
    found, seeds = [], []
    for world_size, steps, workers in ((2, 2, 0), (3, 3, 2), (1, 99, 0)):  # workers draw ahead of what is counted
        ranks = processes.run(world_size, train_under_ddp, str(tmp_path / "run"), steps, workers, collectives=PATIENT)
        found += [sample for seen, _, _ in ranks for sample in seen]
        assert {samples for _, samples, _ in ranks} == {len(found)}
        seeds.append([seed for _, _, seed in ranks])
    assert sorted(found) == list(range(N))
    assert seeds[0] == [0, 0]
    assert seeds[1] == [derived(0, step=2, rank=rank) for rank in range(3)], "H03: a function of seed, step and share"
    assert seeds[2] == [derived(seeds[1][0], step=3, rank=0)]

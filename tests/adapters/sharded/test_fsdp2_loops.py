"""FSDP2 in loops as people write them: ties, frozen layers, groups, schedules, clipping, activation checkpoints, compiled layers and steps."""

import pytest
import torch
from kit.adapters.fsdp2_cases import bits, sharded
from kit.system.rank_refusals_cases import PATIENT, refusal
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import SingleProcess

pytestmark = pytest.mark.slow(2)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)))


class Language(nn.Module):
    """The head and the embedding share a weight of nine rows; the second block is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def made(world_size, *, seed, is_compiled=False):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Language()
    if world_size:
        mesh = init_device_mesh("cpu", (world_size,))
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        for block in model.blocks:
            if is_compiled:
                block.compile(backend="eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    groups = [
        {"params": [each for each in trained.values() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trained.values() if each.dim() == 1], "weight_decay": 0.0, "lr": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, optimizer, schedule, attach(model, optimizer, scheduler=schedule)


def loop(collectives, folder, mode, is_compiled, restore):
    model, optimizer, schedule, live = made(collectives.world_size, seed=9 if restore else 0, is_compiled=is_compiled)
    torch.manual_seed(collectives.rank)
    step = torch.compile(optimizer.step, backend="eager") if is_compiled == "with its step" else optimizer.step
    with CheckpointManager(folder, every=2, mode=mode, collectives=collectives, hold_check=mode == "async") as manager:
        manager.restore(live, step=restore)
        start = bits(model, optimizer)
        while live.progress.step < 6:
            generator = torch.Generator().manual_seed(100 * live.progress.step + collectives.rank)
            tokens = torch.randint(9, (4, 5), generator=generator)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            step()
            schedule.step()
            optimizer.zero_grad()
            live.advance(samples=4)
            manager.step(live)
    return start, bits(model, optimizer), sorted(live.capture().model.params)


def test_a_language_model_with_a_tie_and_a_frozen_layer_resumes_exactly_and_fits_one_process(processes, tmp_path):
    folder = str(tmp_path)
    ((_, wanted, names), *_) = processes.run(2, loop, folder, "async", False, None, collectives=PATIENT)
    for start, end, _ in processes.run(2, loop, folder, "async", False, 4, collectives=PATIENT):
        assert end == wanted
        saved = start
    model, optimizer, _, live = made(0, seed=9)
    assert sorted(live.capture().model.params) == names
    with CheckpointManager(folder, collectives=SingleProcess()) as manager:
        manager.restore(live, step=4)
    assert not live.pending, "activation checkpoints add no state"
    assert bits(model, optimizer) == saved
    assert model.head.weight is model.embed.weight


def compiled(collectives, folder):
    whole, again = (loop(collectives, folder, "async", True, restore) for restore in (None, 4))
    return whole[1], again[1]


def test_compiled_layers_resume_exactly(processes, tmp_path):
    for whole, again in processes.run(2, compiled, str(tmp_path), collectives=PATIENT):
        assert again == whole


@pytest.mark.long
@pytest.mark.slow(10)
def test_compiled_layers_and_a_compiled_step_resume_exactly(processes, tmp_path):
    """The hold of an async save is announced by the step's hook, which a compiled step calls too."""
    folder, warm = (
        str(tmp_path),
        ["torch._inductor.cudagraph_trees"],
    )  # Dynamo imports it at the first step of an optimizer
    how = "with its step"
    ((_, wanted, _), *_) = processes.run(2, loop, folder, "async", how, None, collectives=PATIENT, warm=warm)
    for _, end, _ in processes.run(2, loop, folder, "async", how, 4, collectives=PATIENT, warm=warm):
        assert end == wanted


def statistics(collectives, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (collectives.world_size,))
    model = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7)), mesh=mesh)
    live = attach(model)
    model(torch.randn(8, 6, generator=torch.Generator().manual_seed(collectives.rank)))
    live.advance(samples=8)
    with CheckpointManager(folder, collectives=collectives) as manager:
        found = [refusal(lambda: manager.save(live))]
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
        return [*found, refusal(lambda: manager.save(live))]


def test_batch_statistics_of_each_rank_are_refused_until_those_of_one_are_sent(processes, tmp_path):
    for error, after in processes.run(2, statistics, str(tmp_path), collectives=PATIENT):
        assert error.startswith("RanksDisagree: model.buffers['1.running_mean']")
        assert after == "nothing"


def registered_late(collectives, folder):
    """An average, and an optimizer of its own, come after the restore; the average has just been used."""
    found = []
    for late in (False, True):
        torch.manual_seed(9 if late else 0)
        model, average = sharded(collectives.world_size), sharded(collectives.world_size, seed=9 if late else 3)
        first, second = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, average))
        live = attach(model, first, extra={} if late else {"ema": average, "second": second})
        with CheckpointManager(folder, collectives=collectives) as manager:
            if late:
                manager.restore(live)
                with torch.no_grad():
                    average.eval()(torch.ones(2, 6))
                live.register("ema", average)
                live.register("second", second)
            else:
                for each, optimizer in ((model, first), (average, second)):
                    each(torch.ones(2, 6)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                live.advance(samples=2)
                manager.save(live)
        found.append((bits(model, first), bits(average, second)))
    return found


def test_a_sharded_module_and_its_optimizer_that_are_registered_after_the_restore_get_their_parts(processes, tmp_path):
    for saved, restored in processes.run(2, registered_late, str(tmp_path), collectives=PATIENT):
        assert saved == restored

"""FSDP2 in loops as people write them: ties, frozen layers, groups, schedules, clipping, activation checkpoints, compiled layers and steps."""

import torch
from kit.adapters.fsdp2_cases import bits
from kit.system.rank_refusals_cases import PATIENT
from torch import nn

from trainfold.adapters.live.attach import attach
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.backends.ranks.in_process import SingleProcess


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
    step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
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
    with CheckpointManager(folder, collectives=SingleProcess(), policy={"streams": "adapt"}) as manager:
        manager.restore(live, step=4)
    assert not live.pending, "activation checkpoints add no state"
    assert bits(model, optimizer) == saved
    assert model.head.weight is model.embed.weight


def test_compiled_layers_and_a_compiled_step_resume_exactly(processes, tmp_path):
    """The hold of an async save is announced by the step's hook, which a compiled step calls too."""
    folder = str(tmp_path)
    ((_, wanted, _), *_) = processes.run(2, loop, folder, "async", True, None, collectives=PATIENT)
    for _, end, _ in processes.run(2, loop, folder, "async", True, 4, collectives=PATIENT):
        assert end == wanted

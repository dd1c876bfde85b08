"""Time and memory of a step: trainfold's, donated and not, beside a hand-written loop.

All variants use the same GPT, fused AdamW and clipping. They take turns in one process, so that a noisy machine slows all
of them. Peak memory is measured in a separate process for each variant.

Each variant does a block of steps, as in a run. Its first step finds the caches full of another variant's parameters,
which happens in no run: it is a cost of measuring three variants in one process. It falls on all three, and would make a
real difference look smaller. So the first ratio compares the blocks' median steps without the first step. To hide
nothing, the second ratio compares the blocks' whole times, with the first step and every outlier. Both must meet the
target. The variants run in all six orders, so that each follows each of the others equally often.

    python benchmarks/step.py [--quick] [--json] [--check] [--size 5M] [--device cuda]
"""

import argparse
import copy
import gc
import itertools
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from _targets import Target, finish, machine, make_parser

from trainfold.core.step.init_state import init_state
from trainfold.core.step.loss import Loss
from trainfold.core.step.optimizer import optimizer
from trainfold.core.step.step import make_step

HYPER = {"lr": 3e-4, "weight_decay": 0.1, "fused": True}
CLIP_NORM = 1.0
TARGET_LONG, TARGET_SHORT, TARGET_MEMORY = 1.02, 1.05, 1.02
LONG_STEP_SECS = 0.02
SIZES = {  # name: (width, blocks, vocabulary, sequence length, batch size)
    "0.14M": (64, 2, 512, 16, 4),
    "5M": (256, 5, 4096, 32, 4),
    "25M": (512, 6, 12288, 32, 2),
}
STEPS = {"0.14M": 1440, "5M": 90, "25M": 144}
BLOCK = {"0.14M": 24, "5M": 6, "25M": 6}  # a turn of 60 ms or more, in which the variant fills the caches
BIT_STEPS = 200
VARIANTS = ("loop", "donated", "undonated")


class Block(torch.nn.Module):
    """One block: attention and a perceptron."""

    def __init__(self, width):
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self.heads = width // 32

    def forward(self, x):
        """The usual."""
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=-1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.after(x))


class GPT(torch.nn.Module):
    """A small decoder with a tied head."""

    def __init__(self, width, blocks, vocabulary, length):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=0.02)

    def forward(self, x):
        """The usual."""
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(hidden)))


def loss_fn(model, batch):
    """Return the sum over the tokens, and their number."""
    logits = model(batch["x"])
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return Loss(sum=nll, weight=batch["y"].numel())


class Loop:
    """A hand-written loop, without a check for a non-finite norm."""

    def __init__(self, model):
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), **HYPER)

    def step(self, batch):
        """One step; the loss and the gradient norm."""
        loss = loss_fn(self.model, batch)
        mean = loss.sum / loss.weight
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean.item(), norm.item()

    def params(self):
        """The parameters by name."""
        return {name: value.detach() for name, value in self.model.named_parameters()}


class Fold:
    """trainfold's step on a state."""

    def __init__(self, model, *, donate):
        adamw = optimizer(torch.optim.AdamW, **HYPER)
        self.state = init_state(model, adamw)
        self.function = make_step(model, loss_fn, adamw, clip_norm=CLIP_NORM, donate=donate)

    def step(self, batch):
        """One step; the loss and the gradient norm."""
        self.state, metrics = self.function(self.state, batch)
        return metrics["loss"], metrics["grad_norm"]

    def params(self):
        """The parameters by name."""
        return dict(self.state.model.params)


def make_model(size, device):
    """The model of a size."""
    width, blocks, vocabulary, length, _ = SIZES[size]
    torch.manual_seed(0)
    return GPT(width, blocks, vocabulary, length).to(device)


def make_batches(size, device, count=8):
    """Batches of random tokens."""
    _, _, vocabulary, length, samples = SIZES[size]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (count, samples, length + 1), generator=generator).to(device)
    return [{"x": part[:, :-1].contiguous(), "y": part[:, 1:].contiguous()} for part in tokens]


def make_variant(name, model):
    """A variant by its name."""
    return Loop(model) if name == "loop" else Fold(model, donate=name == "donated")


def wait(device):
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_size(size, steps, device):
    """Return the median seconds per step of each variant, and the medians over rounds of the ratios within a round."""
    model, batches = make_model(size, device), make_batches(size, device)
    variants = {name: make_variant(name, copy.deepcopy(model)) for name in VARIANTS}
    orders = itertools.cycle(itertools.permutations(VARIANTS))
    secs, whole = ({name: [] for name in VARIANTS} for _ in range(2))
    gc.collect()
    gc.disable()  # a collection would fall on the variant that runs next
    try:
        for index, order in zip(range(1 + steps // BLOCK[size]), orders, strict=False):
            for name in order:
                block = time_block(variants[name], batches, BLOCK[size], device)
                if index > 0:  # the first round warms up
                    secs[name].append(statistics.median(block[1:]))
                    whole[name].append(sum(block))
    finally:
        gc.enable()
    median = {name: statistics.median(values) for name, values in secs.items()}
    return {
        "size": size,
        "parameters": sum(value.numel() for value in model.parameters()),
        "steps": steps,
        **{f"{name}_ms": 1e3 * value for name, value in median.items()},
        "ratio": paired(secs["donated"], secs["loop"]),
        "ratio_all_steps": paired(whole["donated"], whole["loop"]),
        "undonated_ratio": paired(secs["undonated"], secs["loop"]),
        "undonated_ratio_all_steps": paired(whole["undonated"], whole["loop"]),
        "target": TARGET_LONG if median["loop"] >= LONG_STEP_SECS else TARGET_SHORT,
    }


def time_block(variant, batches, count, device):
    """Return the seconds of each of several consecutive steps; the first finds the caches full of another variant."""
    secs = []
    for index in range(count + 1):
        wait(device)
        start = time.perf_counter()
        variant.step(batches[index % len(batches)])
        wait(device)
        secs.append(time.perf_counter() - start)
    return secs


def paired(mine, theirs):
    """The median ratio within a round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def same_bits(size, steps, device):
    """Whether the parameters equal those of the loop, bit for bit, after several steps."""
    model, batches = make_model(size, device), make_batches(size, device)
    loop, fold = Loop(copy.deepcopy(model)), Fold(model, donate=True)
    for index in range(steps):
        batch = batches[index % len(batches)]
        if loop.step(batch)[1] != fold.step(batch)[1]:
            return False
    mine, theirs = fold.params(), loop.params()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def peak_of(size, name, device, steps):
    """Return the peak memory of a fresh process that does several steps, without the memory of the imports."""
    command = [sys.executable, __file__, "--measure-peak", name, "--size", size, "--device", device]
    found = subprocess.run([*command, "--steps", str(steps)], check=True, capture_output=True, text=True)
    return int(found.stdout.strip().splitlines()[-1])


def peak_of_fork(size, name, device, steps):
    """Return the peak memory of a fork of this process, which has imported everything; it checks that it runs: its figure means little."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, str(measure_peak(size, name, device, steps)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:  # noqa: PTH123 - a descriptor
        found = int(told.read())
    os.waitpid(child, 0)
    return found


def measure_peak(size, name, device, steps):
    """Return the peak memory of the steps in this process."""
    base = status_bytes("VmRSS")
    variant = make_variant(name, make_model(size, device))
    batches = make_batches(size, device)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports and of building the model
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for index in range(steps):
        variant.step(batches[index % len(batches)])
    return torch.cuda.max_memory_allocated() if device == "cuda" else status_bytes("VmHWM") - base


def status_bytes(field):
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(size, *, quick, device):
    """The figures of a size."""
    row = time_size(size, max(3 * BLOCK[size], STEPS[size] // (20 if quick else 1)), device)
    row["bit_steps"] = 20 if quick else BIT_STEPS
    row["same_bits"] = same_bits(size, row["bit_steps"], device)
    peaks = {name: [] for name in VARIANTS}
    if quick and device == "cpu":
        peaks = {name: [peak_of_fork(size, name, device, 4)] for name in VARIANTS}
    for _ in range(0 if quick and device == "cpu" else 9):
        with ThreadPoolExecutor(len(VARIANTS)) as pool:  # processes do not share their peaks
            found = pool.map(lambda name: peak_of(size, name, device, 4), VARIANTS)
            for name, peak in zip(VARIANTS, found, strict=True):
                peaks[name].append(peak)
    for name, values in peaks.items():
        row[f"{name}_peak_bytes"] = int(statistics.median(values))
    row["peak_ratio"] = row["donated_peak_bytes"] / row["loop_peak_bytes"]
    return row


def targets_of(row):
    """Return the targets of a size."""
    size, limit = row["size"], row["target"]
    return [
        Target(f"{size}: donated / loop, time", row["ratio"], "<=", limit),
        Target(f"{size}: donated / loop, time, first steps too", row["ratio_all_steps"], "<=", limit),
        Target(f"{size}: donated / loop, peak memory", row["peak_ratio"], "<=", TARGET_MEMORY),
        Target(f"{size}: same bits after {row['bit_steps']} steps (1: yes)", int(row["same_bits"]), ">=", 1),
    ]


def line(row):
    """One line of the table."""
    return (
        f"{row['size']:>6}  loop {row['loop_ms']:8.2f} ms   donated {row['donated_ms']:8.2f} ms "
        f"x{row['ratio']:.3f} (all steps x{row['ratio_all_steps']:.3f})   undonated x{row['undonated_ratio']:.3f} "
        f"(x{row['undonated_ratio_all_steps']:.3f})   "
        f"peak {row['donated_peak_bytes'] / 1e6:.0f}/{row['loop_peak_bytes'] / 1e6:.0f} MB x{row['peak_ratio']:.3f}   "
        f"same bits after {row['bit_steps']} steps: {'yes' if row['same_bits'] else 'NO'}"
    )


def main():
    """The command line."""
    parser = make_parser(__doc__, quick="only the smallest size, few steps, and memory measured once, in forks")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only this size; may be repeated")
    parser.add_argument("--measure-peak", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.size or list(SIZES)[: 1 if options.quick else None]
    if options.measure_peak:
        print(measure_peak(sizes[0], options.measure_peak, options.device, options.steps))
        return 0
    around = {**machine(), "device": options.device}
    rows = [measure(size, quick=options.quick, device=options.device) for size in sizes]
    targets = [target for row in rows for target in targets_of(row)]
    return finish(options, {"machine": around, "rows": rows}, targets, map(line, rows))


if __name__ == "__main__":
    sys.exit(main())

"""What it costs to build a model and load its weights: trainfold.construct beside torch, and beside transformers where it is installed.

    python benchmarks/construct.py [--quick] [--json] [--check] [--width 1024] [--blocks 16] [--ranks 2] [--rounds 5] [--directory DIR]

A decoder with a table that no checkpoint has (rotary angles), float32. Each measurement is a forked process of its own, which has
imported everything; the contestants take turns, the first one another each round. Files are in the page cache.

    resume      from the call that builds the model until the first loss is known, with the weights of a checkpoint. trainfold verifies the digest of all that it reads.
                torch: an ordinary build, ``torch.load``, ``load_state_dict``. torch, mapped: a build on meta, ``torch.load(mmap=True)``, ``load_state_dict(assign=True)``,
                and the table made again by hand; its weights are pages of the file, so that what is read again later costs again
    step        the same, and further until the first step of SGD is done: pages of a file that are trained become memory there
    memory      the peak resident set of construction and load above what the process had, less the bytes of the weights; for a rank, less those of its part
    fresh       the same where nothing is loaded and all is initialised; for a rank less the largest tensor, too: each makes one at a time, whole
    transformers  the same for a Llama of the same width: ``from_pretrained``, beside a build on meta of ``from_config``
"""

import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from _forked import forked
from _targets import Target, finish, machine, make_parser
from stall import settled_bytes
from step import status_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainfold
from trainfold.construct import initialize, materialize, on_meta

MIB = 2**20
LIMIT = 64 * MIB
VOCABULARY, TOKENS = 8192, 16


class Block(nn.Module):
    """Attention and a wide layer; 12 * width**2 parameters."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, angles):
        """Turn activations by the angles."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q * angles, k * angles, v, is_causal=True))
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Tied embeddings; the angles are computed in the constructor, and are in no checkpoint."""

    def __init__(self, width, blocks):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("angles", angles_of(width), persistent=False)

    def forward(self, tokens):
        """Return the logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(x)


def angles_of(width):
    """Return the table."""
    return torch.cos(torch.arange(TOKENS)[:, None] / 10000 ** (torch.arange(width) / width))


def loss_of(model):
    """Return a number that every weight takes part in."""
    return float(_loss(model).detach())


def _loss(model):
    found = model(torch.arange(TOKENS)[None] % 96)
    return getattr(found, "logits", found).float().logsumexp(-1).mean()


def stepped(model):
    """Train one step, and return the seconds until its loss was known and those until it was done."""
    began = time.perf_counter()
    loss = _loss(model)
    value = float(loss.detach())
    known = time.perf_counter() - began
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    return value, known, time.perf_counter() - began


def largest_of(model):
    """Return the bytes of the largest parameter, whole."""
    return max(each.numel() * each.element_size() for each in model.parameters())


# --- the contestants: each returns a model with the weights of the checkpoint ---------------------------------------------


def by_trainfold(build, folder, *, collectives=None, cut=lambda model: model):
    """On meta, memory, a restore into it, and what is left."""
    model = cut(on_meta(build))
    materialize(model, "cpu")
    collectives = trainfold.SingleProcess() if collectives is None else collectives
    with trainfold.CheckpointManager(folder, components=["model"], collectives=collectives) as manager:
        manager.restore(trainfold.attach(model), in_place=True)
    initialize(model, seed=0, collectives=collectives)
    return model


def by_torch(build, file):
    """As most scripts do it."""
    model = build()
    model.load_state_dict(torch.load(file, weights_only=True))
    return model


def by_mapped_torch(build, file):
    """The fastest that torch has; ties and tables are made again by hand."""
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(file, weights_only=True, mmap=True), assign=True)
    model.head.weight = model.embedding.weight
    model.angles = angles_of(model.angles.shape[1])
    return model


def fresh(build, *, collectives=None, cut=lambda model: model):
    """A model of which nothing is loaded."""
    model = cut(on_meta(build))
    materialize(model, "cpu")
    initialize(model, seed=0, collectives=collectives)
    return model


def llama(size):
    """A configuration of transformers of the same width."""
    import transformers

    width, blocks = size
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=blocks,
        num_attention_heads=max(1, width // 64), tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip


def of_transformers(size):
    """Return a Llama, as from_config makes it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(llama(size))


def by_transformers(folder):
    """As users of transformers do it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# --- processes ---------------------------------------------------------------------------------------------------------------


def on_ranks(world_size, action, *arguments):
    """Return what a function returns on each rank, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(world_size):
            read, write = os.pipe()
            if os.fork() == 0:
                code = 1
                try:
                    warnings.simplefilter("ignore")
                    dist.init_process_group(
                        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world_size
                    )
                    os.write(write, json.dumps(action(*arguments)).encode())
                    code = 0
                except BaseException:  # noqa: BLE001 - the child ends here
                    traceback.print_exc()
                finally:
                    os._exit(code)
            os.close(write)
            pipes.append(read)
        found = [os.fdopen(pipe).read() for pipe in pipes]
        for _ in pipes:
            os.wait()
    return [json.loads(text) for text in found]


def warm():
    """What the first use of a contestant would import or allocate once for a process, on a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        build = Tiny
        first = fresh(build)
        save_run(first, f"{folder}/a")
        loss_of(by_trainfold(build, f"{folder}/a"))
        torch.save(first.state_dict(), f"{folder}/b")
        loss_of(by_torch(build, f"{folder}/b"))


class Tiny(Decoder):
    """To have everything imported."""

    def __init__(self):
        super().__init__(32, 1)


def measured(contestant, build, source, kind):
    """Seconds until the first loss, or bytes of the peak beyond the weights, in this process."""
    warm()
    if contestant in ("from_pretrained", "trainfold, Llama"):
        import transformers  # noqa: F401
    action = {
        "trainfold": lambda: by_trainfold(build, source),
        "trainfold, Llama": lambda: by_trainfold(build, source),
        "torch": lambda: by_torch(build, source),
        "torch, mapped": lambda: by_mapped_torch(build, source),
        "from_pretrained": lambda: by_transformers(source),
        "fresh": lambda: fresh(build),
    }[contestant]
    if kind == "secs":
        began = time.perf_counter()
        model = action()
        made = time.perf_counter() - began
        loss, known, done = stepped(model)
        return {"secs": made + known, "step_secs": made + done, "loss": loss}
    rest = settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    model = action()
    peak = status_bytes("VmHWM")
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    return {"extra": peak - rest - weights, "largest": largest_of(model), "weights": weights}


def measured_rank(build, source):
    """The same for a rank of FSDP2: beyond the bytes of its part."""
    warm()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    collectives = trainfold.TorchCollectives()

    def cut(model):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    cut(Tiny())
    dist.barrier()
    largest = largest_of(on_meta(build))
    rest = settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # as above
    if source is None:
        model = fresh(build, collectives=collectives, cut=cut)
    else:
        model = by_trainfold(build, source, collectives=collectives, cut=cut)
    peak = status_bytes("VmHWM")
    part = sum(each.to_local().numel() * each.element_size() for each in model.parameters())
    return {"extra": peak - rest - part, "largest": largest, "part": part}


def write_sources(build, folder, size, *, has_transformers):
    """Write the checkpoints, all of one model."""
    model = fresh(build)
    save_run(model, folder / "run")
    torch.save(model.state_dict(), folder / "weights.pt")
    if has_transformers:
        model = fresh(lambda: of_transformers(size))
        save_run(model, folder / "llama-run")
        model.save_pretrained(folder / "llama")


def save_run(model, folder):
    """Save the weights as a run."""
    with trainfold.CheckpointManager(folder, components=["model"], collectives=trainfold.SingleProcess()) as manager:
        live = trainfold.attach(model)
        live.advance(samples=1)
        manager.save(live)


# --- what is measured ----------------------------------------------------------------------------------------------------------


def main():
    """Measure and print."""
    parser = make_parser(__doc__, quick="a model of 1 MB")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    logging.getLogger("trainfold").setLevel(logging.ERROR)  # only the weights are restored, on purpose
    size = (64, 2) if options.quick else (options.width, options.blocks)
    rounds = 1 if options.quick else options.rounds
    has_transformers = importlib.util.find_spec("transformers") is not None and not options.quick

    def build():
        return Decoder(*size)

    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        forked(lambda: write_sources(build, folder, size, has_transformers=has_transformers))
        sources = {"trainfold": "run", "torch": "weights.pt", "torch, mapped": "weights.pt"}
        builds = dict.fromkeys(sources, build)
        if has_transformers:
            sources |= {"trainfold, Llama": "llama-run", "from_pretrained": "llama"}
            builds |= dict.fromkeys(["trainfold, Llama", "from_pretrained"], lambda: of_transformers(size))
        rows = {each: {"secs": [], "step_secs": []} for each in sources}
        for turn in range(rounds):
            for each in list(sources)[:: 1 if turn % 2 else -1]:
                found = forked(measured, each, builds[each], str(folder / sources[each]), "secs")
                rows[each]["secs"].append(found["secs"])
                rows[each]["step_secs"].append(found["step_secs"])
                rows[each]["loss"] = found["loss"]
        for each, source in sources.items():
            rows[each] |= forked(measured, each, builds[each], str(folder / source), "memory")
        rows["fresh"] = forked(measured, "fresh", build, "", "memory")
        ranks = on_ranks(options.ranks, measured_rank, build, str(folder / "run"))
        fresh_ranks = on_ranks(options.ranks, measured_rank, build, None)

    def ratio(mine, theirs, until):
        return statistics.median(a / b for a, b in zip(rows[mine][until], rows[theirs][until], strict=True))

    rank, fresh_rank = (
        max(each["extra"] for each in ranks),
        max(each["extra"] - each["largest"] for each in fresh_ranks),
    )
    targets = [
        Target("construction and load, MiB beyond the weights", rows["trainfold"]["extra"] / MIB, "<=", LIMIT / MIB),
        Target(f"a rank of {options.ranks}, MiB beyond its part", rank / MIB, "<=", LIMIT / MIB),
        Target(
            "fresh, MiB beyond the weights", rows["fresh"]["extra"] / MIB, "<=", LIMIT / MIB,
        ),
        Target(f"fresh, a rank of {options.ranks}, beyond its part and a tensor", fresh_rank / MIB, "<=", LIMIT / MIB),
        Target("first loss of a resume, beside torch", ratio("trainfold", "torch", "secs"), "<=", 1.0),
        Target("first step of a resume, beside torch", ratio("trainfold", "torch", "step_secs"), "<=", 1.0),
    ]  # fmt: skip
    if has_transformers:
        pair = ("trainfold, Llama", "from_pretrained")
        targets.append(Target("first loss, beside from_pretrained", ratio(*pair, "secs"), "<=", 1.0))
        targets.append(Target("first step, beside from_pretrained", ratio(*pair, "step_secs"), "<=", 1.0))
    table = [
        f"{rows['trainfold']['weights'] / MIB:.0f} MiB of weights, the largest tensor {rows['trainfold']['largest'] / MIB:.0f} MiB",
        f"{'':18} {'first loss, s':>14} {'first step, s':>14} {'MiB beyond the weights':>24}",
        *(
            f"{name:18} {_median(row, 'secs'):14.3f} {_median(row, 'step_secs'):14.3f} {row['extra'] / MIB:24.1f}"
            for name, row in rows.items()
        ),
        f"a rank of {options.ranks}: {[round(each['extra'] / MIB, 1) for each in ranks]} MiB beyond its part",
        f"... fresh: {[round(each['extra'] / MIB, 1) for each in fresh_ranks]}",
    ]
    found = {
        "machine": machine(),
        "size": size,
        "rounds": rounds,
        "rows": rows,
        "ranks": ranks,
        "fresh_ranks": fresh_ranks,
    }
    sys.exit(finish(options, found, targets, table))


def _median(row, until):
    return statistics.median(row[until]) if until in row else float("nan")


if __name__ == "__main__":
    main()

"""What it costs to convert weights between formats, and to load a hub directory: beside a plain copy of the same bytes, and beside other libraries.

    python benchmarks/convert.py [--quick] [--json] [--check] [--layers 10] [--rounds 5] [--only NAME ...] [--names 100000] [--directory DIR]

The weights are a Llama of 2,048, float32: 2 GB with 10 layers, and a table of 262 MB as the largest. Each measurement is a forked process of its own, which has imported everything; the contestants take turns, another
first in each round. Every conversion is durable when it ends, and so is the copy.

    conversions   seconds until the target is durable, and the peak resident set above what the process had, pages of mapped files included. ``copy`` copies the files of the source, and syncs them
    loads         seconds until a live model has the weights, warm (files in the page cache) and cold (dropped from it before), and something of each page was read; and ``private``: further until each page was written once,
                  as a step does, so that all weights are in private memory, which no later change of the files can reach; with the CPU seconds and the page faults until then.
                  trainfold and ``load_file`` copy the weights at once, into a model that was built before. ``from_pretrained`` builds it, too, and its weights are pages of the files until something writes them;
                  ``trainfold, built`` is beside that: built on meta, given memory and loaded. What is built first has new memory to be made, which takes longer than the copy. Both are measured if transformers is installed
    planning      CPU seconds from a path to the plan of a conversion of many tensors, from each format to each, and of a Llama with the rules between the hub's names and Meta's: a process that has
                  read nothing yet reads the source's headers, pickles or manifest, and plans all files, headers and indexes of the target
"""

import importlib.util
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from _forked import forked
from _planned import measure_plans
from _targets import Target, finish, machine, make_parser
from stall import settled_bytes
from step import status_bytes
from torch import nn

import trainfold
from trainfold.transforms import hub_rules_of
from trainfold.weights import CheckpointWeights, HubDirectory, Transformed, write_hub_directory

MIB = 2**20
MEMORY_MARGIN = 128 * MIB


class Size:
    """The numbers of the model."""

    def __init__(self, hidden, wide, layers, vocabulary, heads, kv_heads):
        self.hidden, self.wide, self.layers, self.vocabulary = hidden, wide, layers, vocabulary
        self.heads, self.kv_heads = heads, kv_heads

    def config(self):
        """The configuration of the hub."""
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.wide, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "tie_word_embeddings": True, "torch_dtype": "float32", "max_position_embeddings": 64,
        }  # fmt: skip

    def shapes(self):
        """Name -> shape of each tensor, as Meta's code names them."""
        keys = self.hidden // self.heads * self.kv_heads
        found = {"tok_embeddings.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes = {
                "attention.wq": (self.hidden, self.hidden), "attention.wk": (keys, self.hidden), "attention.wv": (keys, self.hidden),
                "attention.wo": (self.hidden, self.hidden), "feed_forward.w1": (self.wide, self.hidden), "feed_forward.w2": (self.hidden, self.wide),
                "feed_forward.w3": (self.wide, self.hidden), "attention_norm": (self.hidden,), "ffn_norm": (self.hidden,),
            }  # fmt: skip
            found |= {f"layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        return {**found, "norm.weight": (self.hidden,)}


def model_of(shapes, *, filled):
    """A module that has these parameters and computes nothing."""
    model = nn.Module()
    for number, (name, shape) in enumerate(shapes.items()):
        *path, last = name.split(".")
        place = model
        for each in path:
            if not hasattr(place, each):
                place.add_module(each, nn.Module())
            place = getattr(place, each)
        value = torch.empty(shape)
        if filled:
            value.copy_(torch.arange(value.numel()).view(shape)).mul_(number + 1)
        place.register_parameter(last, nn.Parameter(value))
    return model


# --- conversions: each writes a directory ------------------------------------------------------------------------------------


def copy(source, target):
    """The bytes of all files, durable."""
    target.mkdir()
    for file in sorted(source.rglob("*")):
        if file.is_file():
            shutil.copyfile(file, target / file.name)
            sync(target / file.name)
    sync(target)


def sync(path):
    """Make a file or directory durable."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def native_to_hub(folder, target, **options):
    """A checkpoint of this library to a hub directory."""
    write_hub_directory(CheckpointWeights(folder / "run"), target, **options)


def hub_to_hub(folder, target, **options):
    """A hub directory to the names of other code, in files of another size."""
    write_hub_directory(HubDirectory(folder / "hub"), target, shard_bytes="500MB", **options)


def conversions(size):
    """Name -> the function that writes a target, and the one that it is compared with."""
    config = size.config()
    rules = hub_rules_of(config)
    return {
        "copy": (lambda folder, target: copy(folder / "run", target), None),
        "native to hub": (native_to_hub, "copy"),
        "native to hub, llama": (partial(native_to_hub, rules=rules, config=config), "copy"),
        "native to hub, bfloat16": (partial(native_to_hub, dtype="bfloat16"), "copy"),
        "hub to names of llama": (partial(hub_to_hub, rules=rules.inverse), "copy"),
    }


# --- loads: each puts weights into a model --------------------------------------------------------------------------------


def by_trainfold(model, folder, rules):
    """From the files into the memory of the model."""
    source = HubDirectory(folder / "hub")
    trainfold.attach(model, weights=source if rules is None else Transformed(source, rules)).take_weights()
    return model


def by_load_file(model, folder):
    """As scripts without transformers do it."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted((folder / "hub").glob("*.safetensors")):
        found |= load_file(file)
    model.load_state_dict(found)
    return model


def by_transformers(folder):
    """As users of transformers do it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder / "hub", dtype=torch.float32)


def by_trainfold_built(folder):
    """The same without a model that is there."""
    import transformers

    from trainfold.construct import materialize, on_meta

    config = transformers.AutoConfig.from_pretrained(folder / "hub")
    model = on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    materialize(model, "cpu")
    return by_trainfold(model, folder, None)


def loaded_and_trained(load):
    """Seconds of a load until something of each page of the weights was read, and further until it was written, as the first step of training does."""
    rest = settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    model = load()
    pages = [each.detach().view(-1)[::1024] for each in model.parameters()]
    _ = sum(float(each.sum()) for each in pages)
    secs = time.perf_counter() - began
    for each in pages:
        each.mul_(0.5)
    private_secs = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "secs": secs,
        "private_secs": private_secs,
        "private_cpu_secs": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "private_faults": after.ru_minflt - before.ru_minflt,
        "peak_bytes": max(0, status_bytes("VmHWM") - rest),
    }


LOADS = ("trainfold", "trainfold, llama", "load_file", "from_pretrained", "trainfold, built")
BUILT = {"from_pretrained": by_transformers, "trainfold, built": by_trainfold_built}
"""Those that build the model, by the classes of transformers."""


# --- processes ---------------------------------------------------------------------------------------------------------------


def measured(action):
    """Seconds, and the peak of the resident set, of a call in this process."""
    rest = settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    began = time.perf_counter()
    action()
    secs = time.perf_counter() - began
    return {"secs": secs, "peak_bytes": max(0, status_bytes("VmHWM") - rest)}


def converted(write, folder, target):
    """Measure a conversion, and remove what it wrote."""
    try:
        return measured(lambda: write(folder, target))
    finally:
        shutil.rmtree(target, ignore_errors=True)


def loaded(contestant, folder, size):
    """Measure a load into a model that is there."""
    hub = HubDirectory(folder / "hub").specs()
    warm(folder)
    if contestant in BUILT:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        _ = transformers.LlamaForCausalLM  # imported when it is first asked for
        return loaded_and_trained(lambda: BUILT[contestant](folder))
    shapes = size.shapes() if contestant == "trainfold, llama" else {name: each.shape for name, each in hub.items()}
    model = model_of(shapes, filled=True)
    rules = hub_rules_of(size.config()).inverse if contestant == "trainfold, llama" else None
    load = by_load_file if contestant == "load_file" else partial(by_trainfold, rules=rules)
    return loaded_and_trained(lambda: load(model, folder))


def warm(folder):
    """What the first use would import."""
    tiny = model_of({"w": (1,)}, filled=True)
    trainfold.attach(tiny)
    HubDirectory(folder / "hub").specs()


def prepare(folder, size):
    """Write the sources: a run, and the hub directory that comes of it."""
    live = trainfold.attach(model_of(size.shapes(), filled=True))
    live.advance(samples=1)
    trainfold.save(live.capture(), folder / "run")
    config = size.config()
    run = CheckpointWeights(folder / "run")
    write_hub_directory(run, folder / "hub", rules=hub_rules_of(config), config=config, shard_bytes="1GB")
    os.sync()


def drop_from_cache(folder):
    """Drop the pages of all files, so that the next reader waits for the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def keep_in_cache(folder):
    """Read all files once."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.read_bytes()


# --- what is measured ----------------------------------------------------------------------------------------------------------


def in_turns(rounds, names, measure):
    """The results of each name, another one first in each round."""
    found = {name: [] for name in names}
    for turn in range(rounds if names else 0):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            found[name].append(measure(name))
    return found


def ratios(found, base, name, what="secs"):
    """How many times as fast as another one it was, round by round; the median."""
    return statistics.median(one[what] / other[what] for one, other in zip(found[base], found[name], strict=True))


def measure_conversions(folder, size, rounds, only):
    """A row for each conversion."""
    every = conversions(size)
    names = [name for name in every if not only or name in only or "conversions" in only]
    names = ["copy", *names] if names and "copy" not in names else names
    found = in_turns(rounds, names, lambda name: forked(lambda: converted(every[name][0], folder, folder / "target")))
    rows = []
    for name in names:
        base = every[name][1]
        rows.append(
            {
                "name": name,
                "secs": statistics.median(each["secs"] for each in found[name]),
                "of_base": None if base is None else ratios(found, base, name),
                "peak_bytes": max(each["peak_bytes"] for each in found[name]),
            }
        )
    return rows


def measure_loads(folder, size, rounds, only):
    """A row for each load, warm and cold."""
    names = [name for name in LOADS if not only or name in only or "loads" in only]
    if importlib.util.find_spec("transformers") is None:
        names = [name for name in names if name not in BUILT]
    rows = []
    for cache in ("warm", "cold"):

        def measure(name, cache=cache):
            (keep_in_cache if cache == "warm" else drop_from_cache)(folder / "hub")
            return forked(lambda: loaded(name, folder, size))

        found = in_turns(rounds, names, measure)
        rows += [
            {
                "name": name,
                "cache": cache,
                "secs": statistics.median(each["secs"] for each in found[name]),
                **{
                    what: statistics.median(each[what] for each in found[name])
                    for what in ("private_secs", "private_cpu_secs", "private_faults")
                },
                "of_trainfold": ratios(found, name, "trainfold") if "trainfold" in names else None,
                "private_of_trainfold": ratios(found, name, "trainfold", "private_secs")
                if "trainfold" in names
                else None,
                "peak_bytes": max(each["peak_bytes"] for each in found[name]),
            }
            for name in names
        ]
    return rows


def main():
    """Measure and print."""
    parser = make_parser(__doc__, quick="a model of 1 MB")
    parser.add_argument("--layers", type=int, default=10, help="180 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--names", type=int, default=100_000, help="tensors of the planning")
    parser.add_argument(
        "--only", nargs="+", default=[], help="conversions, loads, planning, or some conversions and loads by name"
    )
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    size = Size(64, 96, 2, 512, 4, 2) if options.quick else Size(2048, 5632, options.layers, 32000, 32, 8)
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(dir=options.directory) as top:
        folder = Path(top)
        written, loads, planning = [], [], {"tensors": 0, "rows": []}
        only = set(options.only)
        if only != {"planning"}:
            forked(lambda: prepare(folder, size))
            written = measure_conversions(folder, size, rounds, only)
            loads = measure_loads(folder, size, rounds, only)
        if not only or "planning" in only:
            planning = measure_plans(folder / "plans", 300 if options.quick else options.names, rounds)
    size_bytes = sum(4 * torch.Size(each).numel() for each in size.shapes().values())
    largest = max(4 * torch.Size(each).numel() for each in size.shapes().values())
    targets = [
        Target(f"{each['name']}, speed / copy", each["of_base"], ">=", 0.7) for each in written if each["of_base"]
    ]
    targets += [
        Target(
            f"{each['name']}, peak / (2 largest + 128 MiB)", each["peak_bytes"] / (2 * largest + MEMORY_MARGIN), "<=", 1
        )
        for each in written
        if each["name"] != "copy"
    ]
    targets += [
        Target(f"load, {each['cache']}{said}: {each['name']} / trainfold", each[key], ">=", 1)
        for each in loads
        if each["of_trainfold"] and not each["name"].startswith("trainfold")
        for said, key in (("", "of_trainfold"), (" until private", "private_of_trainfold"))
    ]
    targets += [
        Target(f"planning {each['source']} -> {each['to']}, CPU seconds", each["cpu_secs"], "<=", 2)
        for each in planning["rows"]
    ]
    found = {
        "machine": machine(), "size_bytes": size_bytes, "largest_bytes": largest, "rounds": rounds,
        "conversions": written, "loads": loads, "planning": planning,
    }  # fmt: skip
    table = [f"{size_bytes / 1e9:.3g} GB, the largest tensor {largest / 1e6:.3g} MB, medians of {rounds}"]
    table += [
        f"  {each['name']:28} {each['secs']:8.3f} s  {size_bytes / each['secs'] / 1e9:6.2f} GB/s  "
        f"{'' if each['of_base'] is None else format(each['of_base'], '.2f') + ' x copy':12}  peak {each['peak_bytes'] / MIB:7.0f} MiB"
        for each in written
    ]
    table += [
        f"  load {each['name']:18} {each['cache']:4} {each['secs']:8.3f} s, private {each['private_secs']:8.3f} s, {each['private_cpu_secs']:6.2f} s of CPU, {each['private_faults']:7.0f} faults  "
        f"{'' if each['of_trainfold'] is None else format(each['of_trainfold'], '.2f') + ' x trainfold':18} peak {each['peak_bytes'] / MIB:7.0f} MiB"
        for each in loads
    ]
    table += [
        f"  planning {planning['tensors']:,} tensors, {each['source']:14} -> {each['to']:6} {each['cpu_secs']:6.2f} s of CPU"
        for each in planning["rows"]
    ]
    return finish(options, found, targets, table)


if __name__ == "__main__":
    sys.exit(main())

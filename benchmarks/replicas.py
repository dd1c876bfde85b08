"""What it costs that one replica records the digest of a leaf that others write too: bytes and CPU time of each replica of a save (ADR-0035).

Replicas are simulated: each writes its own files, one after the other, in this process. The digest of a whole leaf is that of its bytes in order, so the first
writer of a leaf also reads what the others write of it. A content sum could be added up instead, if each replica summed what it writes. CPU time in one thread.

    python benchmarks/replicas.py [--quick] [--json] [--check] [--directory DIR]
"""

import sys
import tempfile
from pathlib import Path

import torch
import xxhash
from _targets import Target, cpu_secs, finish, machine, make_parser

from trainfold.backends.formats.native import writer
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.content_sum import box_sum
from trainfold.core.format.structure.describe import describe
from trainfold.core.save.save_plan import plan_save
from trainfold.core.tensor_memory import tensor_bytes

DIRECTORY = "step-00000001"
MIB = 2**20


def states(scale):
    """Return states by name; at a scale of 1 each has about 512 MiB."""
    width = round(768 * scale**0.5)
    shapes = {"embedding": (50_257, width)}
    for layer in range(12):
        for name, rows in (("up", 4 * width), ("down", 4 * width), ("qkv", 3 * width), ("out", width)):
            shapes[f"{layer}.{name}"] = (rows, width)
    return {
        "one leaf": {"w": noise(round(512 * MIB * scale) // 4)},
        "three leaves of 8 rows": {f"w{index}": noise(8, round(171 * MIB * scale) // 32) for index in range(3)},
        "transformer of 12 layers": {name: noise(*shape) for name, shape in shapes.items()},
    }


def noise(*shape):
    """Return numbers that are not all alike, made quickly."""
    return torch.randint(0, 2**30, shape, dtype=torch.int32).view(torch.float32)


def replica_secs(plan, leaves, rounds, directory):
    """Return the CPU time in which a replica writes its files."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".bench-") as place:
        store = LocalStore(place)
        return sum(
            cpu_secs(lambda file=file: writer.write_file(file, leaves, store=store, directory=DIRECTORY), rounds)
            for file in plan.files
        )


def measure(leaves, count, rounds, directory):
    """Return bytes and CPU time of replicas: the largest over the mean, with and without the digest of whole leaves."""
    described, leaves = describe(leaves, "model")
    plans = [plan_save([{"model": described}] * count, step=1, only=rank) for rank in range(count)]
    written = [sum(each.stop - each.start for file in plan.files for each in file.tensors) for plan in plans]
    secs = {"with": [], "without": []}
    rest_of = writer._Stream._rest_of  # noqa: SLF001 (what is measured)
    for plan in plans:
        secs["with"].append(replica_secs(plan, leaves, rounds, directory))
        writer._Stream._rest_of = lambda *_: iter(())  # noqa: SLF001
        secs["without"].append(replica_secs(plan, leaves, rounds, directory))
        writer._Stream._rest_of = rest_of  # noqa: SLF001
    gigabytes = sum(written) / 1e9
    return {
        "bytes": count * max(written) / sum(written),
        **{f"cpu_{name}": count * max(each) / sum(each) for name, each in secs.items()},
        **{f"secs_per_gb_{name}": sum(each) / gigabytes for name, each in secs.items()},
    }


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="small states")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    around, rounds = machine(), 1 if options.quick else 5
    data = tensor_bytes(noise((1 if options.quick else 64) * MIB // 4))
    hashed = cpu_secs(lambda: xxhash.xxh3_128_digest(data), rounds) / len(data) * 1e9
    summed = cpu_secs(lambda: box_sum(data, "float32", ((0, len(data) // 4),)), rounds) / len(data) * 1e9
    rows = {
        f"{name}, {count} replicas": measure(leaves, count, rounds, options.directory)
        for name, leaves in states(1 / 64 if options.quick else 1).items()
        for count in (2, 4, 8)
    }
    table = [f"XXH3 takes {hashed:.3f} and a content sum {summed:.3f} CPU-s per GB"] + [
        f"{name:38} bytes {row['bytes']:.3f}, CPU {row['cpu_with']:.2f} of the mean, {row['cpu_without']:.2f} without the digest of whole leaves; "
        f"{row['secs_per_gb_with']:.2f} and {row['secs_per_gb_without']:.2f} CPU-s per GB of the state"
        for name, row in rows.items()
    ]
    targets = [
        Target("most bytes of a replica / mean", max(row["bytes"] for row in rows.values()), "<=", 1.02),
        Target("CPU of a content sum / XXH3", summed / hashed, ">=", 2.0),
    ]
    return finish(options, {"machine": around, "hashed": hashed, "summed": summed, "rows": rows}, targets, table)


if __name__ == "__main__":
    sys.exit(main())

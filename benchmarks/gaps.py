"""Whether a load that needs pieces with gaps between them reads the gaps too: what a read of its own costs, and what a piece costs.

A part of a shard is read in pieces of 1 MiB, each with a digest. Two needed pieces with another one between them are two reads, or one read of
three pieces. CPU time in one thread; the file is in the page cache.

    python benchmarks/gaps.py [--quick] [--json] [--check] [--directory DIR]
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import xxhash
from _targets import Target, cpu_secs, finish, machine, make_parser

from trainfold.backends.formats.native import reader
from trainfold.backends.formats.native.scatter import Inside
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES

WIDTH = 16  # bytes that are needed of each piece


def requests(ranges, pieces, out):
    """Return a request for each range of pieces, for the first bytes of each row; a row is a piece."""
    rows = out.shape[0]
    return [
        reader.ReadRequest(
            "step-00000001/a", low * PIECE_BYTES, high * PIECE_BYTES, "uint8", "U8", (rows, WIDTH), "", out=out,
            inside=Inside((rows, PIECE_BYTES), (0, 0), low * PIECE_BYTES),
            pieces=pieces[low * DIGEST_DIGITS : high * DIGEST_DIGITS],
        )
        for low, high in ranges
    ]  # fmt: skip


def measure(count, rounds, directory):
    """Return seconds of a piece, and of a read of its own: all pieces, each as a read of its own, and as one read."""
    store = LocalStore(directory)
    data = [os.urandom(PIECE_BYTES) for _ in range(count)]
    store.write("step-00000001/a", data, size_bytes=count * PIECE_BYTES)
    pieces = "".join(map(xxhash.xxh3_128_hexdigest, data))
    out = torch.empty(count, WIDTH, dtype=torch.uint8)
    ways = {"apart": [(index, index + 1) for index in range(count)], "together": [(0, count)]}
    secs = {}
    for name, ranges in ways.items():
        wanted = requests(ranges, pieces, out)
        secs[name] = cpu_secs(lambda wanted=wanted: reader.read_tensors(store, wanted), rounds)
    return {"piece_secs": secs["together"] / count, "read_secs": (secs["apart"] - secs["together"]) / count, **secs}


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="a few pieces")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    around = machine()
    reader._THREADED_FROM_BYTES = 1 << 62  # noqa: SLF001 (one thread)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
        row = measure(8 if options.quick else 128, 2 if options.quick else 15, directory)
    ratio = row["piece_secs"] / max(row["read_secs"], 1e-9)
    targets = [Target("a piece in a gap / a read of its own", ratio, ">=", 1.0)]
    table = [
        f"a piece costs {1e6 * row['piece_secs']:.0f} us, a read of its own {1e6 * row['read_secs']:.0f} us of CPU time"
    ]
    return finish(options, {"machine": around, "row": row}, targets, table)


if __name__ == "__main__":
    sys.exit(main())

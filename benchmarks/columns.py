"""Ways to load columns: what each of n ranks reads if it needs 1/n of each row of a tensor, and rows are smaller than a verified piece.

The ranks are forked processes with gloo. The tensor is one shard of a file. The ways take turns, and each verifies every byte that it uses,
except DCP, which has no digests. Figures of CPU time are of all ranks together.

    pieces      as loads do: each rank reads and verifies every piece of 1 MiB in which it needs something
    tiles       digests of blocks of rows and columns instead, of at most 1 MiB or one row, which end where the needed columns end; the file is the same. A rank reads a run of bytes for each row
    tiles, span the same digests; the gaps between the needed columns are read too, up to a tile's rows at once. All gaps of a tensor have one size, so there is nothing between these two
    exchange    as loads do where ranks share a store: each rank reads 1/n of the pieces and sends them to the others, in rounds of 16 MiB a rank; each verifies all that it uses
    DCP         torch.distributed.checkpoint, of the same rows on as many ranks

``cut`` is the dimension that is cut; None for replicas, each of which needs all of it. Files are in the page cache, or dropped from it (cold). ``slow`` is
the time from a store that answers a request after 20 ms, and gives all ranks together 1 GB/s: each read sleeps as long as that.

    python benchmarks/columns.py [--quick] [--json] [--check] [--ranks 2 4 8] [--rounds 5] [--directory DIR]
"""

import contextlib
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from _targets import Target, finish, machine, make_parser
from ranks import on_ranks, together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainfold.backends.formats.native import reader
from trainfold.backends.formats.native.scatter import Inside
from trainfold.backends.ranks.torch_distributed import TorchCollectives
from trainfold.backends.runs.shared_reads import ROUND_BYTES, SharedReads, SharedStore
from trainfold.backends.stores.local import LocalStore
from trainfold.core.format.dtypes import STORED
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES
from trainfold.core.layout.sharing.ranges import ByteSpan
from trainfold.core.layout.sharing.rank_grid import rank_grid
from trainfold.core.layout.sharing.share_ranges import share_ranges
from trainfold.core.layout.slices import whole_box
from trainfold.core.tensor_memory import tensor_bytes

CASES = [
    ((4096, 4096), "float32", 1),
    ((4096, 4096), "bfloat16", 1),
    ((1024, 11008), "float32", 1),
    ((11008, 1024), "bfloat16", 1),
    ((8, 1024, 2048), "float32", 2),
    ((8, 1 << 21), "float32", 1),
    ((4096, 4096), "float32", None),
]  # shape, dtype, the dimension that is cut
QUICK = [((512, 1024), "float32", 1), ((512, 1024), "float32", None)]
SLOW_SECS, SLOW_BYTES = 0.02, 1e9  # of a request; a second, for all ranks together
SLOW_WAYS = ("pieces", "exchange")
NAME = "step-00000001/a"
LIMITS = {"read": 1.25, "all": 1.05}


def make_values(shape, dtype):
    """Return a tensor of which no two pieces are equal."""
    count, size = torch.Size(shape).numel(), STORED[dtype].itemsize
    bits = torch.arange(count * size // 4, dtype=torch.int32) * 40_503 + 7
    return bits.view(getattr(torch, dtype)).reshape(shape)


def wanted_box(shape, cut, rank, ranks):
    """Return what a rank needs: an equal part of a dimension, or all."""
    box = list(whole_box(shape))
    if cut is not None:
        step = shape[cut] // ranks
        box[cut] = rank * step, (rank + 1) * step
    return tuple(box)


def digests(data):
    """Return the digests of the pieces of a file."""
    return [xxhash.xxh3_128_hexdigest(data[low : low + PIECE_BYTES]) for low in range(0, len(data), PIECE_BYTES)]


def check(data, wanted):
    """Verify a buffer."""
    assert xxhash.xxh3_128_hexdigest(data) == wanted


class Counted:
    """A store that counts reads and their bytes, and may be slow."""

    def __init__(self, store, *, share_bytes=0):
        self._store, self._share_bytes, self._line, self.reads, self.bytes = store, share_bytes, threading.Lock(), 0, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    @contextlib.contextmanager
    def opened(self, name):
        """Keep a file open."""
        with self._store.opened(name) as read_into:

            def counted(buffer, start):
                self.reads, self.bytes = self.reads + 1, self.bytes + len(buffer)
                read_into(buffer, start)
                if self._share_bytes:
                    time.sleep(SLOW_SECS)
                    with self._line:
                        time.sleep(len(buffer) / self._share_bytes)

            yield counted

    def read_into(self, name, buffer, *, start=0):
        """Read once."""
        with self.opened(name) as read_into:
            read_into(buffer, start)


class Case:
    """A tensor in a file, and what this rank needs of it."""

    def __init__(self, shape, dtype, cut, folder):
        self.shape, self.dtype, self.cut, self.folder = shape, dtype, cut, folder
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.boxes = [wanted_box(shape, cut, rank, self.ranks) for rank in range(self.ranks)]
        self.box = self.boxes[self.rank]
        values = make_values(shape, dtype)
        if self.rank == 0:
            data = tensor_bytes(values)
            LocalStore(folder).write(NAME, [data], size_bytes=len(data))
        self.expected = values[tuple(slice(*side) for side in self.box)].clone()
        self.pieces = digests(tensor_bytes(values))
        self.itemsize, self.size_bytes = values.element_size(), values.nbytes
        self.rows, self.step = self._flat(values)
        self.world = TorchCollectives()
        spans = [tuple(ByteSpan(0, low, high) for low, high in ranges_of(self, box)) for box in self.boxes]
        wanted, self.grid = list(dict.fromkeys(spans)), rank_grid(self.ranks, most_connected=self.ranks)
        needs = list(map(wanted.index, spans))
        self.rounds = list(
            share_ranges(wanted, needs=needs, grid=self.grid, unit_bytes=PIECE_BYTES, round_bytes=ROUND_BYTES)
        )
        self.placement = Replicate() if cut is None else Shard(cut)
        self.mesh = init_device_mesh("cpu", (self.ranks,))
        share = values.tensor_split(self.ranks)[self.rank].clone()
        saved = DTensor.from_local(share, self.mesh, [Shard(0)], shape=values.shape, stride=values.stride())
        dcp.save({"w": saved}, checkpoint_id=str(folder / "dcp"))
        dist.barrier()

    def _flat(self, values):
        """Return the tensor as rows of which this rank needs columns, and the rows of a tile; keep the digests of its tiles."""
        flat = values.flatten(0, -2)
        self.low, self.high = self.box[-1]
        width = (self.high - self.low) * self.itemsize
        step = max(1, PIECE_BYTES // width)
        self.tiles = [
            xxhash.xxh3_128_hexdigest(tensor_bytes(flat[row : row + step, self.low : self.high].contiguous()))
            for row in range(0, len(flat), step)
        ]
        return len(flat), step

    def fresh(self):
        """Return memory for what this rank needs."""
        return torch.empty_like(self.expected)


def ranges_of(case, box):
    """Return the bytes of the pieces in which a rank needs something, in order."""
    row = case.shape[-1] * case.itemsize
    if case.cut is None or row <= PIECE_BYTES:
        return [(0, case.size_bytes)]
    ranges = []
    for index in range(case.rows):  # pieces with nothing of it are left out
        low, high = (index * row + side * case.itemsize for side in box[-1])
        ranges.append((low // PIECE_BYTES * PIECE_BYTES, -(-high // PIECE_BYTES) * PIECE_BYTES))
    return ranges


def read_pieces(case, store):
    """Read as a load does where ranks share no store."""
    out, starts = case.fresh(), tuple(low for low, _ in case.box)
    requests = [
        reader.ReadRequest(
            NAME, low, high, case.dtype, STORED[case.dtype].name, tuple(out.shape), "", out=out,
            inside=Inside(case.shape, starts, low), pieces="".join(case.pieces[low // PIECE_BYTES : -(-high // PIECE_BYTES)]),
        )
        for low, high in ranges_of(case, case.box)
    ]  # fmt: skip
    assert len(case.pieces[0]) == DIGEST_DIGITS
    reader.read_tensors(store, requests)
    return out


def read_tiles(case, store):
    """Read the columns row by row."""
    out = case.fresh()
    memory, row = tensor_bytes(out), case.shape[-1] * case.itemsize
    first, width = case.low * case.itemsize, (case.high - case.low) * case.itemsize
    with store.opened(NAME) as read_into:
        for number, top in enumerate(range(0, case.rows, case.step)):
            rows = range(top, min(top + case.step, case.rows))
            for index in rows if width < row else ():
                read_into(memory[index * width : (index + 1) * width], index * row + first)
            tile = memory[rows.start * width : rows.stop * width]
            if width == row:
                read_into(tile, rows.start * row)
            check(tile, case.tiles[number])
    return out


def read_spans(case, store):
    """Read the columns of a tile, and what is between them."""
    out = case.fresh()
    flat, memory = out.flatten(0, -2), tensor_bytes(out)
    row, width = case.shape[-1], case.high - case.low
    with store.opened(NAME) as read_into:
        for number, top in enumerate(range(0, case.rows, case.step)):
            stop = min(top + case.step, case.rows)
            buffer = torch.empty(((stop - top - 1) * row + width,), dtype=out.dtype)
            read_into(tensor_bytes(buffer), (top * row + case.low) * case.itemsize)
            flat[top:stop].copy_(buffer.as_strided((stop - top, width), (row, 1)))
            check(memory[top * width * case.itemsize : stop * width * case.itemsize], case.tiles[number])
    return out


def read_once(case, store):
    """Read as a load does where ranks share a store."""
    if not case.rounds:
        return read_pieces(case, store)
    shared = SharedStore(store, SharedReads(store, case.world), [NAME], iter(case.rounds), case.grid, mine=[(0, 0, 0)])
    out = read_pieces(case, shared)
    shared.finish()
    return out


def raw(tensor):
    """Return the bytes of a tensor, as a tensor."""
    return tensor.view(torch.uint8)


def load_dcp(case, store):
    """Load with DCP, and count the bytes that it asks the system for."""
    out = case.fresh()
    wanted = DTensor.from_local(out, case.mesh, [case.placement], shape=torch.Size(case.shape), stride=torch.empty(case.shape, device="meta").stride())  # fmt: skip
    before = system_reads()
    dcp.load({"w": wanted}, checkpoint_id=str(case.folder / "dcp"))
    after = system_reads()
    store.bytes, store.reads = after[0] - before[0], after[1] - before[1]
    return out


def system_reads():
    """Return the bytes and the calls of read of this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["syscr"])


WAYS = {"pieces": read_pieces, "tiles": read_tiles, "tiles, span": read_spans, "exchange": read_once, "DCP": load_dcp}


def drop(folder):
    """Drop the files from the page cache."""
    if dist.get_rank() == 0:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    dist.barrier()


def of_all(*values):
    """Return the sums and the largest of the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    most = total.clone()
    dist.all_reduce(total)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return total.tolist(), most.tolist()


def measure(shape, dtype, cut, rounds, folder):
    """Return the figures of a tensor by way."""
    folder.mkdir(exist_ok=True)
    case = Case(shape, dtype, cut, folder)
    needed = case.expected.nbytes
    found = {
        name: {"cached": [], "cold": [], "slow": [], "cpu": []}
        for name in WAYS
        if cut is not None or "tiles" not in name
    }
    for turn in range(rounds + 1):
        for name in list(found)[:: 1 if turn % 2 else -1]:
            for kind in ("cold", "cached", *(["slow"] if name in SLOW_WAYS else [])):
                store = Counted(LocalStore(folder), share_bytes=SLOW_BYTES / case.ranks if kind == "slow" else 0)
                if kind == "cold":
                    drop(folder)
                kept, began = {}, time.process_time()
                secs = together(lambda name=name, store=store, kept=kept: kept.update(out=WAYS[name](case, store)))
                cpu = time.process_time() - began
                same = torch.equal(raw(kept["out"]), raw(case.expected))
                total, most = of_all(store.bytes, store.reads, cpu, not same)
                if turn:
                    found[name][kind].append(secs)
                    if kind == "cached":
                        found[name]["cpu"].append(total[2])
                found[name] |= {"read": most[0] / needed, "all": total[0] / case.size_bytes, "reads": int(most[1])}
                found[name]["same_bits"] = not total[3]
    return {"shape": list(shape), "dtype": dtype, "cut": cut, "ranks": case.ranks, "bytes": case.size_bytes, "ways": found,
            "same_bits": all(each["same_bits"] for each in found.values())}  # fmt: skip


def lines(row):
    """Return the lines of a table of a tensor."""
    gb, middle = row["bytes"] / 1e9, statistics.median
    yield f"{row['dtype']}{row['shape']}, dimension {row['cut']} cut, {row['ranks']} ranks"
    yield f"  {'':12}{'read/needed':>12}{'read/stored':>12}{'reads a rank':>13}{'CPU-s/GB':>10}{'cached ms':>11}{'cold ms':>10}{'slow ms':>10}"
    for name, each in row["ways"].items():
        wall = middle(each["cached"])
        yield (
            f"  {name:12}{each['read']:12.2f}{each['all']:12.2f}{each['reads']:13}{middle(each['cpu']) / gb:10.2f}"
            f"{1e3 * wall:11.1f}{1e3 * middle(each['cold']):10.1f}{1e3 * middle(each['slow'] or [math.nan]):10.1f}"
        )


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="2 MB on 2 ranks")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the filesystem to measure")
    options = parser.parse_args()
    cases, counts, rounds = (QUICK, [2], 1) if options.quick else (CASES, options.ranks, options.rounds)
    around, rows, table = machine(), [], []
    for count in counts:
        for case in cases:
            with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as directory:
                rows.append(on_ranks(count, measure, *case, rounds, Path(directory) / "run"))
            table += lines(rows[-1])
            print(*lines(rows[-1]), sep="\n", file=sys.stderr, flush=True)
    cut = [row["ways"] for row in rows if row["cut"] is not None]
    every = [row["ways"] for row in rows]
    targets = [
        *(Target(f"{name}: most bytes of a rank / needed", max(ways[name]["read"] for ways in cut), "<=", LIMITS["read"]) for name in ("pieces", "exchange")),
        *(Target(f"{name}: bytes of all ranks / stored", max(ways[name]["all"] for ways in every), "<=", LIMITS["all"]) for name in ("pieces", "exchange")),
    ]  # fmt: skip
    return finish(options, {"machine": around, "rounds": rounds, "rows": rows}, targets, table)


if __name__ == "__main__":
    sys.exit(main())

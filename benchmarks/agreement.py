"""What it costs ranks to agree, over a mesh and over a tree: time on processes here, a model of it, and what a coordinator reads and writes.

Each process is a rank, over gloo on this machine; ways take turns. A model with three numbers a way is fitted on 2 and 4 processes, tried on 8 and 16, and printed for as many ranks as no
machine here has. Messages and bytes of rank 0 are counted: its part of a tree runs here, and its neighbours are simulated.

    python benchmarks/agreement.py [--quick] [--json] [--check] [--rounds N]
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from _targets import Target, finish, machine, make_parser
from plan import sharded_state

import trainfold
from trainfold.backends.ranks.call import Call, Deadline
from trainfold.backends.ranks.processes.edges import Edges
from trainfold.backends.ranks.processes.mesh import call_digest, head_bytes
from trainfold.backends.ranks.processes.tree import HEAD, HEAD_BYTES, PIECE_BYTES, SIZE, TreeExchange
from trainfold.backends.ranks.processes.waiting import look_secs
from trainfold.backends.ranks.torch_distributed import TorchCollectives
from trainfold.backends.ranks.wire import to_wire
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.layout.agreement.rank_tree import rank_tree
from trainfold.core.layout.file_preference import ONE_A_RANK_FROM, FilePreference
from trainfold.core.layout.world import World
from trainfold.ranks import run_threads

WAYS = ("mesh", "tree")
SIZES = (
    10,
    2_000,
    200_000,
)  # bytes of a value: a vote, more than a rank describes of its state, and what shows the rate
WORLDS = (2, 4, 8, 16)
LARGE = (64, 1_024, 16_384)
NODE = 4  # ranks of a simulated node here
STEP_SECS = 0.03  # between two boundaries


# --- time on processes -----------------------------------------------------------------------------------------------


def rank_of(rank, size, folder, rounds):
    """Time gathers on one rank, and write the medians."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    ways, made = {}, {}
    for way in WAYS:
        before, began = sockets(), time.perf_counter()
        ways[way] = TorchCollectives(topology=way, timeout_secs=120)
        made[way] = (time.perf_counter() - began, len(sockets() - before))
    found = {}
    for _ in range(rounds):
        for (way, ranks), size_bytes in product(ways.items(), SIZES):
            value = b"x" * size_bytes
            for _ in range(3):
                ranks.barrier(timeout_secs=60)
                began = time.perf_counter()
                ranks.gather(value)
                found.setdefault((way, size_bytes), []).append(time.perf_counter() - began)
        for way, ranks in ways.items():
            found.setdefault((way, "row"), []).append(boundary_secs(ranks))
    rows = {f"{way} {size_bytes}": statistics.median(each) for (way, size_bytes), each in found.items()}
    Path(f"{folder}/told-{rank}").write_bytes(repr((rows, made)).encode())
    ranks.barrier(timeout_secs=60)
    os._exit(0)


def boundary_secs(ranks):
    """Return what a boundary of a manager takes of a rank: it starts to send a row, trains, and reads the rows of all."""
    ranks.barrier(timeout_secs=60)
    began = time.perf_counter()
    pending = ranks.start_gather(list(range(10)))
    started = time.perf_counter()
    time.sleep(STEP_SECS)
    trained = time.perf_counter()
    pending.wait()
    return started - began + time.perf_counter() - trained


def sockets():
    """Return the sockets of this process."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(each.readlink()))
        except FileNotFoundError:  # that of the listing
            continue
    return {each for each in found if each.startswith("socket:")}


def measure(size, rounds):
    """Return the seconds of a gather, the median of the ranks, and the most sockets of a rank, for each way."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_of, args=(rank, size, folder, rounds)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        told = [eval((Path(folder) / f"told-{rank}").read_text()) for rank in range(size)]
    secs = {key: statistics.median(rows[key] for rows, _ in told) for key in told[0][0]}
    return {
        "ranks": size,
        "secs": secs,
        "sockets": {way: max(made[way][1] for _, made in told) for way in WAYS},
        "make_secs": {way: max(made[way][0] for _, made in told) for way in WAYS},
    }


# --- the model -------------------------------------------------------------------------------------------------------


def tree_secs(size, size_bytes, cores, link):
    """Return the seconds of a gather up and down a tree: the hops, and the work on the slowest way, or of all ranks if they share too few cores.

    At each hop a rank that sleeps has to get a core, and waits the longer the more ranks share it. In a ring the threads of gloo pass messages on.
    """
    tree, each = rank_tree(size, node_ranks=NODE if cores < size else 8), size_bytes + SIZE.size
    hop, work, rate = link
    waits, works, busy = [], [], 0.0
    begun, late = pieces_of(size * each)
    for hop_secs, message_secs, byte_secs in ((hop, 0.0, 0.0), (0.0, work, 1 / rate)):
        up, down, last = {}, {0: 0.0}, 0.0
        for place in reversed(list(tree.places())):
            now = 0.0
            for child in sorted(place.children, key=lambda child, up=up: up[child.start]):
                count, moved = message(child.size * each)
                now = max(now, up[child.start] + count * hop_secs) + count * message_secs + moved * byte_secs
                busy += count * message_secs + moved * byte_secs
            up[place.rank] = now
        for place in tree.places():
            now = down[place.rank]
            for child in place.children:
                now += begun[0] * message_secs + begun[1] * byte_secs
                down[child.start] = now + begun[0] * hop_secs
            rest = len(place.children) * (late[0] * message_secs + late[1] * byte_secs)
            busy += now - down[place.rank] + rest
            last = max(last, rest)  # of all levels at the same time
        (works if message_secs else waits).append(up[0] + max(down.values()) + last)
    return waits[0] * max(1, size / cores) + max(works[0], busy / cores)


def pieces_of(body):
    """Return messages and bytes of what comes down: those for which the next level waits, and those that follow while it works."""
    rest = max(body - (HEAD_BYTES - HEAD.size), 0)
    first = min(rest, PIECE_BYTES)
    return (1 + bool(first), HEAD_BYTES + first), (-(-(rest - first) // PIECE_BYTES), rest - first)


def mesh_secs(size, size_bytes, cores, link):
    """Return the seconds of a gather around a ring, which is what gloo does in a mesh."""
    hop, work, rate = link
    head = head_bytes(size)
    each = [head, *([size_bytes + 24 - head] if size_bytes + 24 > head else [])]
    steps = (size - 1) * len(each)
    mine = steps * work + sum(each) * (size - 1) / rate
    return steps * hop + max(mine, size * mine / cores)


def message(body):
    """Return messages and bytes of a body of a size: a head, and a rest if there is one."""
    rest = max(body - (HEAD_BYTES - HEAD.size), 0)
    return (2 if rest else 1), HEAD_BYTES + rest


MODELS = {"mesh": mesh_secs, "tree": tree_secs}


def fitted(way, rows, cores):
    """Return seconds a hop, seconds of work a message, and bytes a second, by which 2 and 4 processes are off least."""
    known = [(row["ranks"], size_bytes, row["secs"][f"{way} {size_bytes}"]) for row in rows[:2] for size_bytes in SIZES]
    grid = [10 ** (-5 + index / 10) for index in range(21)]

    def off(link):
        return sum(abs(MODELS[way](size, size_bytes, cores, link) / secs - 1) for size, size_bytes, secs in known)

    return min(product(grid, grid, (3e7, 1e8, 2e8, 3e8, 1e9)), key=off)


# --- what a coordinator reads and writes ------------------------------------------------------------------------------


class Done:
    """An exchange that is over."""

    def is_completed(self):
        """Yes."""
        return True

    def wait(self):
        """Return at once."""


class Simulated:
    """A child of a rank: it sends what so many ranks would give, of so many bytes or nothing, and takes what comes."""

    def __init__(self, ranks, size_bytes, count):
        self.body = b"" if size_bytes is None else SIZE.pack(size_bytes) * ranks + bytes(size_bytes) * ranks
        self.count, self.rest = count, b""

    def receive(self, data, timeout_secs):
        """Give the next bytes of what the child sends."""
        del timeout_secs
        if not self.rest:
            self.rest = HEAD.pack(*self.count.head, 1, len(self.body)) + self.body
        data.copy_(torch.frombuffer(bytearray(self.rest[: len(data)].ljust(len(data), b"\0")), dtype=torch.uint8))
        self.rest = self.rest[len(data) :]
        self.count.received += 1
        self.count.bytes_received += len(data)
        return Done()

    def send(self, data, timeout_secs):
        """Take bytes."""
        del timeout_secs
        self.count.sent += 1
        self.count.bytes_sent += len(data)
        return Done()


class Count:
    """What rank 0 has sent and received, and the head of its call."""

    def __init__(self):
        self.sent = self.received = self.bytes_sent = self.bytes_received = 0
        self.head = (0, 0)


class Healthy:
    """How rank 0 waits where nothing fails."""

    def check(self):
        """Nothing has failed."""

    def in_background(self):
        """Return itself: no thread waits."""
        return self

    def wait(self, work, call, until):
        """Return at once."""
        del work, call, until


def counted(size, kind, size_bytes):
    """Return what rank 0 of a tree sends and receives in a gather, or in a broadcast of its own, counted while it runs."""
    tree, call, count = rank_tree(size), Call(kind), Count()
    count.head = (0, call_digest(call))
    place = tree.place(0)
    children = [Simulated(child.size, size_bytes if kind == "gather" else None, count) for child in place.children]
    rank = TreeExchange(Healthy(), place, Edges(None, children), size, lambda: None)
    if kind == "gather":
        assert rank.meet(call, bytes(size_bytes), Deadline(60.0)) == [bytes(size_bytes)] * size
    else:
        assert rank.give(call, bytes(size_bytes), 0, Deadline(60.0)) == bytes(size_bytes)
    return {"messages": count.sent + count.received, "sent": count.bytes_sent, "received": count.bytes_received}


class Recorded:
    """Ranks that note what this one gives in each call."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []
        self.rank, self.world_size = inner.rank, inner.world_size

    def gather(self, value, *, doing="", is_vote=False):
        """Note it, and gather."""
        self.calls.append(("gather", doing, len(to_wire(value))))
        return self.inner.gather(value, doing=doing, is_vote=is_vote)

    def broadcast(self, value, *, source=0, doing="", is_vote=False):
        """Note it, and broadcast."""
        self.calls.append(("broadcast", doing, len(to_wire(value))))
        return self.inner.broadcast(value, source=source, doing=doing, is_vote=is_vote)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Asked:
    """A store that counts the requests to it."""

    def __init__(self, inner):
        self.inner, self.requests = inner, {}

    def __getattr__(self, name):
        method = getattr(self.inner, name)
        if not callable(method):
            return method

        def asked(*arguments, **options):
            self.requests[name] = self.requests.get(name, 0) + 1
            return method(*arguments, **options)

        return asked


class RankFiles(MemoryStore):
    """A store for which few ranks write one data file each, as many do by themselves."""

    prefers = FilePreference(1)


def save_and_load(ranks, leaves, kind):
    """Save on threads and load again; return for each the calls, with the bytes that a rank gives, and the requests of rank 0."""
    store, found = kind(), {}
    for action in ("save", "load"):
        stores, worlds = {}, {}

        def act(world, action=action, stores=stores, worlds=worlds):
            mine = stores[world.rank] = Asked(store)
            recorded = worlds[world.rank] = Recorded(world)
            state = sharded_state(leaves, World(world.rank, ranks))
            if action == "save":
                trainfold.save(state, mine, collectives=recorded)
            else:
                trainfold.load(mine, like=state, collectives=recorded)

        run_threads(ranks, act)
        pairs = zip(worlds[0].calls, worlds[ranks - 1].calls, strict=True)
        found[action] = {
            "calls": [first if first[0] == "broadcast" else last for first, last in pairs],
            "requests": stores[0].requests,
        }
    files = [name for each in store.list() if each.startswith("step-") for name in store.list(each)]
    root = sum(store.size(f"{each}/manifest.json") for each in store.list() if each.startswith("step-"))
    return {"ranks": ranks, "files": len(files) - 1, "root_bytes": root, **found}


def coordinator(small, large, size):
    """Return what rank 0 does on so many ranks: what is linear in them, from two sizes, and its messages, counted for the bytes that ranks give.

    What grows by less than half a byte for each rank has a number with more digits, and is not linear.
    """

    def at(read):
        low, high = read(small), read(large)
        return high + round((high - low) / (large["ranks"] - small["ranks"])) * (size - large["ranks"])

    def of(action):
        calls = [
            (kind, doing, at(lambda row, index=index: row[action]["calls"][index][2]))
            for index, (kind, doing, _) in enumerate(large[action]["calls"])
        ]
        moved = [counted(size, kind, size_bytes) for kind, _, size_bytes in calls]
        kinds = sorted({*small[action]["requests"], *large[action]["requests"]})
        requests = {kind: at(lambda row, kind=kind: row[action]["requests"].get(kind, 0)) for kind in kinds}
        return {
            "calls": calls,
            **{name: sum(each[name] for each in moved) for name in ("messages", "sent", "received")},
            "requests": requests,
        }

    return {
        "ranks": size,
        "sockets": rank_tree(size).place(0).neighbours + 1,
        "files": at(lambda row: row["files"]),
        "root_bytes": at(lambda row: row["root_bytes"]),
        "looks_a_sec": size / look_secs(size),
        "save": of("save"),
        "load": of("load"),
    }


def coordinators(sizes):
    """Return what rank 0 does on each of some numbers of ranks."""
    saves = {kind: [save_and_load(ranks, 20, kind) for ranks in (8, 16)] for kind in (MemoryStore, RankFiles)}
    plain = [coordinator(*saves[MemoryStore], size) for size in sizes]
    return [
        {**(coordinator(*saves[RankFiles], each["ranks"]) if each["ranks"] >= ONE_A_RANK_FROM else each), "plain": each}
        for each in plain
    ]


def coordinator_table(found):
    """Return its lines, a column for each number of ranks."""
    rows = [
        ("rank 0 of so many ranks", lambda each: f"{each['ranks']:,}"),
        ("sockets, in a tree", lambda each: f"{each['sockets']}"),
        ("sockets, in a mesh", lambda each: f"{each['ranks']:,}"),
        ("looks at the notice board a second, of all that wait", lambda each: f"{each['looks_a_sec']:,.0f}"),
        ("files of a checkpoint, and its root", lambda each: f"{each['files'] + 1:,}"),
        ("  if each component had files of its own", lambda each: f"{each['plain']['files'] + 1:,}"),
        ("root, MB", lambda each: f"{each['root_bytes'] / 1e6:.2f}"),
    ]
    for action in ("save", "load"):
        rows += [
            (f"a {action}: exchanges", lambda each, action=action: f"{len(each[action]['calls'])}"),
            ("  messages of them", lambda each, action=action: f"{each[action]['messages']:,}"),
            ("  MB received", lambda each, action=action: f"{each[action]['received'] / 1e6:,.1f}"),
            ("  MB sent", lambda each, action=action: f"{each[action]['sent'] / 1e6:,.1f}"),
            ("  requests to the store", lambda each, action=action: f"{sum(each[action]['requests'].values()):,}"),
        ]
        if action == "save":
            of_parts = "      if each component had files of its own"
            rows += [
                ("    of them for the size of a file", lambda each: f"{each['save']['requests']['size']:,}"),
                (of_parts, lambda each: f"{each['plain']['save']['requests']['size']:,}"),
            ]
    return [f"{name:54}" + "".join(f"{read(each):>10}" for each in found) for name, read in rows]


# --- the table -------------------------------------------------------------------------------------------------------


def checked(rows, cores):
    """Return the links of each way, and what they predict for each number of processes, beside what was measured."""
    links = {way: fitted(way, rows, cores) for way in WAYS}
    predicted = [
        {
            "ranks": row["ranks"],
            "way": way,
            "bytes": size_bytes,
            "secs": row["secs"][f"{way} {size_bytes}"],
            "predicted_secs": MODELS[way](row["ranks"], size_bytes, cores, links[way]),
        }
        for row in rows
        for way, size_bytes in product(WAYS, SIZES)
    ]
    return links, predicted


def table_of(found):
    """Return the lines for people."""
    lines = [
        f"a gather, ms of a rank; tree: nodes of {NODE}, fan-out 8; processes on {found['machine']['cores']} cores"
    ]
    lines += [f"  {'ranks':>6} {'way':5} {'bytes':>7} {'measured':>9} {'model':>9}   model / measured"]
    for row in found["checks"]:
        ratio = row["predicted_secs"] / row["secs"]
        kind = "fitted" if row["ranks"] in WORLDS[:2] else "predicted"
        lines += [
            f"  {row['ranks']:6} {row['way']:5} {row['bytes']:7,} {1e3 * row['secs']:9.2f} {1e3 * row['predicted_secs']:9.2f}   {ratio:5.2f} {kind}"
        ]
    for way, (hop, work, rate) in found["links"].items():
        lines += [
            f"  model, {way}: {1e6 * hop:.0f} us a hop, {1e6 * work:.0f} us of a core a message, {rate / 1e6:,.0f} MB/s"
        ]
    lines += ["a row that is started at a boundary and read at the next one, ms of a rank"]
    lines += [
        f"  {row['ranks']:6}  " + "  ".join(f"{way} {1e3 * row['secs'][f'{way} row']:6.2f}" for way in WAYS)
        for row in found["rows"]
    ]
    lines += ["the most sockets of a rank, and seconds to connect it"]
    lines += [
        f"  {row['ranks']:6}  "
        + "  ".join(f"{way} {row['sockets'][way]:3} {row['make_secs'][way]:6.3f} s" for way in WAYS)
        for row in found["rows"]
    ]
    lines += ["by the model, a core for each rank, nodes of 8: ms of a gather"]
    for row in found["large"]:
        lines += [
            f"  {row['ranks']:6,} {row['bytes']:7,} bytes: mesh {1e3 * row['mesh']:10.1f}, tree {1e3 * row['tree']:8.1f}; {row['shape']}"
        ]
    lines += coordinator_table(found["coordinators"])
    return lines


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="2 and 4 processes, and 64 ranks")
    parser.add_argument("--rounds", type=int, default=25, help="of three gathers of each kind")
    options = parser.parse_args()
    around, worlds, large = machine(), WORLDS[:2] if options.quick else WORLDS, LARGE[:1] if options.quick else LARGE
    cores = around["cores"]
    rows = [measure(size, 2 if options.quick else options.rounds) for size in worlds]
    links, checks = checked(rows, cores)
    modelled = [
        {
            "ranks": size,
            "bytes": size_bytes,
            **{way: MODELS[way](size, size_bytes, size, links[way]) for way in WAYS},
            "shape": str(rank_tree(size)),
        }
        for size, size_bytes in product(large, SIZES[:2])
    ]
    found = {"machine": around, "rows": rows, "links": links, "checks": checks, "large": modelled}
    found["coordinators"] = coordinators(large)
    last = {(each["way"], each["bytes"]): each for each in checks if each["ranks"] == worlds[-1]}
    targets = [
        Target(
            "a vote of the most processes: mesh / tree",
            last["mesh", 10]["secs"] / last["tree", 10]["secs"],
            ">=",
            1.0,
        ),
        *(
            Target(
                f"model / measured, {each['way']}, {each['ranks']} ranks, {each['bytes']} bytes",
                max(ratio, 1 / ratio),
                "<=",
                2.0,
            )
            for each in checks
            if each["ranks"] in WORLDS[2:]
            for ratio in [each["predicted_secs"] / each["secs"]]
        ),
        Target("sockets of rank 0 of the most ranks, tree", found["coordinators"][-1]["sockets"], "<=", 20),
    ]
    return finish(options, found, targets, table_of(found))


if __name__ == "__main__":
    sys.exit(main())

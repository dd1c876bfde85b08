"""What it takes to list a run of 1,000 checkpoints, each of 16,384 ranks, and to find what one of many ranks resumes: seconds and requests.

The store answers each request after 20 ms, as an object store in another building does. The newest checkpoint is whole: a root with an index and a file
of each rank. Of the older ones only the first lines of their manifests are there; reading more of them would show.

    python benchmarks/discovery.py [--quick] [--json] [--check] [--checkpoints N] [--ranks N] [--delay-ms N]
"""

import sys
import time
from collections import Counter

import attrs
from _targets import Target, finish, machine, make_parser

from trainfold.adapters.cli.ls import list_store
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.digest import digest_of
from trainfold.core.format.file_names import MANIFEST, RUN_FILE, index_name
from trainfold.core.format.indexes.needed import Needs
from trainfold.core.format.manifest import (
    ComponentRecord,
    FileRecord,
    Head,
    IndexRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
    encode_index,
    encode_manifest,
)
from trainfold.core.history.inventory import current_head
from trainfold.core.layout.mesh import make_mesh
from trainfold.core.layout.placement import make_placement

DIGEST = digest_of(b"")
ROWS, BYTES_A_ROW = 4, 32  # of the tensor, for each rank
START = 4096  # of the tensor in a file


class Far:
    """A store that answers after a delay, and counts what it was asked."""

    def __init__(self, store, delay_secs):
        self._store, self._delay_secs = store, delay_secs
        self.asked = Counter()

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def ask(*args, **options):
            self.asked[name] += 1
            time.sleep(self._delay_secs)
            return found(*args, **options)

        return ask


def put(store, name, data):
    """Put a file into a store."""
    store.write(name, [data], size_bytes=len(data))


def newest(ranks, step):
    """Return the manifest of a tensor that is cut into rows, and its indexes by name."""
    rule = make_placement(make_mesh((ranks,)), [[0]])
    shape, size = (ROWS * ranks, BYTES_A_ROW // 4), START + ROWS * BYTES_A_ROW
    shards = tuple(
        ShardRecord(rank, START, size, ((ROWS * rank, ROWS * (rank + 1)), (0, shape[1])), DIGEST)
        for rank in range(ranks)
    )
    files = tuple(FileRecord(f"ema-{rank:05d}.safetensors", ("ema",), rank, size, DIGEST) for rank in range(ranks))

    def manifest(held, indexes=()):
        record = TensorRecord("ema", "float32", shape, tuple(held), rule)
        component = ComponentRecord("ema", ({"t": 0},), ((record,),), DIGEST)
        return Manifest(Head("run", step), ranks, (component,), (), {}, {}, files, indexes)

    data = {index_name(rank, ranks): encode_index(manifest([shards[rank]]), rank) for rank in range(1, ranks)}
    indexes = tuple(
        IndexRecord(name, rank, len(each), digest_of(each)) for rank, (name, each) in enumerate(data.items(), start=1)
    )
    return manifest([shards[0]], indexes), data


def filled(checkpoints, ranks):
    """Return a store with the run."""
    store, (whole, indexes) = MemoryStore(), newest(ranks, checkpoints)
    root = encode_manifest(whole)
    put(store, RUN_FILE, b'{"format":"trainfold-run","version":1,"run_id":"run"}\n')
    for step in range(1, checkpoints):
        older = encode_manifest(attrs.evolve(whole, head=Head("run", step), files=whole.files[:1], indexes=()))
        put(store, f"step-{step:08d}/{MANIFEST}", older.partition(b",\n")[0] + b",\nnot read")
    name = f"step-{checkpoints:08d}"
    put(store, f"{name}/{MANIFEST}", root)
    for each, data in indexes.items():
        put(store, f"{name}/{each}", data)
    contents = (START - 8).to_bytes(8, "little") + bytes(START - 8 + ROWS * BYTES_A_ROW)
    for file in whole.files:
        put(store, f"{name}/{file.name}", contents)
    return store, len(root)


def resumed(store, ranks):
    """Return what one of three quarters as many ranks looks at before it reads tensors."""
    inventory = read_inventory(store)
    head = current_head(inventory)
    name = next(entry.name for entry in inventory.entries if entry.head == head)
    world, rank = 3 * ranks // 4, ranks // 2
    rule = make_placement(make_mesh((world,)), [[0]])
    needs = Needs(rank, world, lambda _component, _path, shape: rule.box(shape, (rank,)))
    entry = examine(store, inventory, name, needs=needs).entry(name)
    assert entry.problem is None, entry.problem
    return entry


def timed(action, far):
    """Return the seconds of an action, and the requests that it made."""
    far.asked.clear()
    began = time.perf_counter()
    found = action()
    return time.perf_counter() - began, dict(far.asked), found


def main():
    """Run it."""
    parser = make_parser(__doc__, quick="30 checkpoints of 20 ranks, 2 ms")
    parser.add_argument("--checkpoints", type=int, default=1_000)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    options = parser.parse_args()
    checkpoints, ranks, delay_ms = (
        (30, 20, 2.0) if options.quick else (options.checkpoints, options.ranks, options.delay_ms)
    )
    around = machine()
    store, root_bytes = filled(checkpoints, ranks)
    far = Far(store, delay_ms / 1e3)
    list_secs, list_asked, answer = timed(lambda: list_store(far, read_inventory(far)), far)
    listed = answer.data["checkpoints"]
    assert len(listed) == checkpoints
    assert answer.data["newest"] == listed[-1]["name"], listed[-1]
    find_secs, find_asked, _ = timed(lambda: resumed(far, ranks), far)
    table = [
        f"{checkpoints:,} checkpoints of {ranks:,} ranks, {delay_ms:g} ms a request; a root of {root_bytes / 1e6:.1f} MB",
        f"  ls       {list_secs:6.2f} s  {sum(list_asked.values()):6,} requests {list_asked}",
        f"  resume   {find_secs:6.2f} s  {sum(find_asked.values()):6,} requests {find_asked}",
    ]
    targets = [
        Target("ls, s", list_secs, "<=", 2.0),
        Target("resume, before it reads tensors, s", find_secs, "<=", 2.0),
    ]
    asked = {"ls": list_asked, "resume": find_asked}
    found = {
        "machine": around,
        "secs": {"ls": list_secs, "resume": find_secs},
        "asked": asked,
        "root_bytes": root_bytes,
    }
    return finish(options, found, targets, table)


if __name__ == "__main__":
    sys.exit(main())

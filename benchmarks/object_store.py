"""Runs in a bucket: speed beside the client's own put and get of the same bytes, and requests beside torch.distributed.checkpoint over fsspec.

A server of S3 in a process of its own on the loopback counts the requests. Saves and loads are whole: of a model, with digests, manifest, lease and commit,
by a program that has begun, whose first save is not measured. Ways take turns; medians, and medians of the ratios within a turn. Torch's checkpoints go over s3fs if it is installed; otherwise
over the memory of fsspec, of which calls are counted: each is a request at least.

    python benchmarks/object_store.py [--quick] [--json] [--check] [--mib 256] [--rounds 5]
"""

import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import obstore
import torch
from _targets import Target, finish, machine, make_parser
from obstore.store import S3Store

import trainfold
from trainfold.stores import ObjectStore, TwoTiers, copy_run

SERVER = """
import json, sys, threading
from moto.s3.models import FakeKey
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

# moto reads an object whole for each range of it, and copies the range. Here objects are kept as bytes, and ranges are sent in blocks:
# what is sent costs the same in one request or in many, as with a provider
value, BLOCK = FakeKey.value, 1 << 18

def put(key, data):
    value.fset(key, data)
    if isinstance(key.name, str):  # parts have numbers
        key._kept = bytes(data)

FakeKey.value = property(lambda key: vars(key).get("_kept") or value.fget(key), put)
inner, counts, lock = DomainDispatcherApplication(create_backend_app), {"requests": 0, "sent": 0, "received": 0}, threading.Lock()

def app(environ, start):
    if environ["PATH_INFO"] == "/counts":
        with lock:
            found = json.dumps(counts).encode()
            counts.update(dict.fromkeys(counts, 0))
        start("200 OK", [("Content-Length", str(len(found)))])
        return [found]
    FakeKey.instances_tracked.clear()  # else no object is ever freed
    span = environ.pop("HTTP_RANGE", "") if environ["REQUEST_METHOD"] == "GET" else ""
    said = []
    answer = b"".join(inner(environ, lambda *args: said.append(args[:2])))
    status, headers = said[0]
    size, low, high = len(answer), 0, len(answer)
    if span and status.startswith("200"):
        first, _, last = span.removeprefix("bytes=").partition("-")
        low, high = int(first), min(int(last or size) + 1, size)
        status = "206 PARTIAL CONTENT" if low < size else "416 REQUESTED RANGE NOT SATISFIABLE"
        headers = [each for each in headers if each[0].lower() != "content-length"]
        headers += [("Content-Length", str(max(0, high - low))), ("Content-Range", f"bytes {low}-{high - 1}/{size}")]
    with lock:
        counts["requests"] += 1
        counts["sent"] += int(environ.get("CONTENT_LENGTH") or 0)
        counts["received"] += max(0, high - low)
    start(status, headers)
    return (answer[at : min(at + BLOCK, high)] for at in range(low, high, BLOCK)) if span else [answer]

WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections stay open, as those of providers do
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
"""
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "AWS_REGION": "us-east-1"}
UP, DOWN, COPY = ("upload", "put"), ("download", "get"), ("copy", "put of a file")


@contextmanager
def server():
    """The port of a new server with a bucket named bucket."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", SERVER, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            with suppress(OSError):
                counts(port)
                break
            time.sleep(0.02)
        owner = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT", headers={"Authorization": owner})
        )
        yield port
    finally:
        process.kill()
        process.wait()


def counts(port):
    """Requests and bytes since the last call."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts", timeout=10) as answer:
        return json.load(answer)


def client(port, run):
    """A client for a prefix of the bucket."""
    return S3Store(
        "bucket", prefix=run, endpoint=f"http://127.0.0.1:{port}", region="us-east-1",
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"], secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": timedelta(seconds=120)},
    )  # fmt: skip


def model_of(mib):
    """A model of 16 matrices."""
    torch.manual_seed(0)
    return torch.nn.ModuleDict({f"part{number}": torch.nn.Linear(1024, mib * 16, bias=False) for number in range(16)})


def secs(action):
    """The seconds of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def speeds(port, model, rounds):
    """Seconds of each way, in turns."""
    live = trainfold.attach(model)
    data = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    plain = client(port, "plain")
    found = {way: [] for way in (*UP, *DOWN)}
    for number in range(rounds + 1):
        live.advance(samples=1)
        store = ObjectStore(client(port, f"run{number}"), url=f"s3://bucket/run{number}")
        store.reserve(0)
        state = live.capture()
        ways = {
            "upload": lambda state=state, store=store: trainfold.save(state, store),
            "put": lambda: obstore.put(plain, "data", data),
            "download": lambda state=state, store=store: trainfold.load(store, like=state),
            "get": lambda: obstore.get(plain, "data").bytes(),
        }
        order = [*ways] if number % 2 else ["put", "upload", "get", "download"]
        for way in order:
            taken = secs(ways[way])
            if number:  # the first turn warms up
                found[way].append(taken)
        store.delete(f"step-{number + 1:08}/")
    return found


def requests_of_ours(port, model):
    """Requests and bytes of a save and a resume."""
    live = trainfold.attach(model)
    store = ObjectStore(client(port, "counted"), url="s3://bucket/counted")
    live.advance(samples=1)
    trainfold.save(live.capture(), store)
    live.advance(samples=1)
    counts(port)
    trainfold.save(live.capture(), store)
    saved = counts(port)
    again = ObjectStore(client(port, "counted"), url="s3://bucket/counted")
    trainfold.load(again, like=live.capture())
    return {"save": saved, "load": counts(port)}


def requests_of_torch(port, model):
    """The same of torch.distributed.checkpoint over fsspec, and over which file system."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    if importlib.util.find_spec("s3fs") is None:
        return requests_in_memory(dcp, FsspecReader, FsspecWriter, model)
    options = {
        "key": KEYS["AWS_ACCESS_KEY_ID"], "secret": KEYS["AWS_SECRET_ACCESS_KEY"], "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
    }  # fmt: skip
    state = {"model": model.state_dict()}
    counts(port)
    dcp.save(state, storage_writer=FsspecWriter("s3://bucket/dcp", **options), no_dist=True)
    saved = counts(port)
    dcp.load(state, storage_reader=FsspecReader("s3://bucket/dcp", **options), no_dist=True)
    return {"save": saved, "load": counts(port), "over": "s3fs"}


def requests_in_memory(dcp, reader, writer, model):
    """Calls of the memory of fsspec; bytes as they are written and read."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    calls = []

    class Counted(MemoryFileSystem):
        protocol = "counted"

        def __getattribute__(self, name):
            if name in {
                "open",
                "_open",
                "ls",
                "info",
                "exists",
                "mkdirs",
                "makedirs",
                "rename",
                "mv",
                "rm",
                "cat_file",
            }:
                calls.append(name)
            return super().__getattribute__(name)

    fsspec.register_implementation("counted", Counted, clobber=True)
    state, found = {"model": model.state_dict()}, {}
    size = sum(each.nbytes for each in state["model"].values())
    dcp.save(state, storage_writer=writer("counted://dcp"), no_dist=True)
    found["save"] = {"requests": len(calls), "sent": size, "received": 0}
    calls.clear()
    dcp.load(state, storage_reader=reader("counted://dcp"), no_dist=True)
    found["load"] = {"requests": len(calls), "sent": 0, "received": size}
    return {**found, "over": "the memory of fsspec (calls)"}


def copies(port, model, rounds):
    """Seconds of a copy from a disk to the bucket, and of the client's own put of the same file, in turns; of a save in two tiers, until each has it; requests of both."""
    live = trainfold.attach(model)
    plain, found, requests = client(port, "plain"), {way: [] for way in (*COPY, "on the disk", "uploaded")}, {}
    with tempfile.TemporaryDirectory() as disk:
        live.advance(samples=1)
        trainfold.save(live.capture(), f"{disk}/run")
        (file,) = Path(disk).glob("run/step-*/model-*.safetensors")
        for number in range(rounds + 1):
            far = ObjectStore(client(port, f"copy{number}"), url=f"s3://bucket/copy{number}")
            counts(port)
            ways = {
                "copy": lambda far=far: copy_run(f"{disk}/run", far),
                "put of a file": lambda: obstore.put(plain, "file", file),
            }
            for way in sorted(ways, reverse=number % 2 == 0):
                taken = secs(ways[way])
                requests[way] = counts(port)
                if number:  # the first turn warms up
                    found[way].append(taken)
            far.delete("step-00000001/")
        events, far = [], ObjectStore(client(port, "far"), url="s3://bucket/far")
        run = TwoTiers(f"{disk}/near", far)
        with trainfold.CheckpointManager(run, keep_last=1, mode="sync", on_event=events.append) as manager:
            for _ in range(rounds + 1):
                live.advance(samples=1)
                counts(port)
                manager.save(live)
                run.wait()
                requests["two tiers"] = counts(port)
        for kind, way in (("committed", "on the disk"), ("uploaded", "uploaded")):
            found[way] = [event.secs for event in events if event.kind == kind][1:]
    return found, requests


def listing(port, number):
    """Requests of a list of a run with so many checkpoints."""
    from trainfold.adapters.cli.ls import list_store
    from trainfold.backends.runs.scan import read_inventory
    from trainfold.backends.stores.protocol import glimpse

    store = ObjectStore(client(port, "many"), url="s3://bucket/many")
    for step in range(1, number + 1):
        trainfold.save(trainfold.TrainState(trainer=trainfold.Progress(step=step)), store)
    counts(port)
    seen = glimpse(ObjectStore(client(port, "many"), url="s3://bucket/many"))
    list_store(seen, read_inventory(seen))
    return counts(port)["requests"]


def main():
    """Measure all of it."""
    parser = make_parser(__doc__, quick="4 MiB, once")
    parser.add_argument("--mib", type=int, default=256, help="the size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkpoints", type=int, default=1000, help="those of the run that is listed")
    options = parser.parse_args()
    around = machine()
    warnings.simplefilter("ignore")
    mib, rounds, number = (4, 1, 5) if options.quick else (options.mib, options.rounds, options.checkpoints)
    with server() as port:
        model = model_of(mib)
        found = speeds(port, model, rounds)
        copied, sent = copies(port, model, rounds)
        found |= copied
        ours, theirs = requests_of_ours(port, model), requests_of_torch(port, model)
        listed = listing(port, number)
    rows = {way: statistics.median(each) for way, each in found.items()}
    ratios = {
        mine: statistics.median(b / a for a, b in zip(found[mine], found[its], strict=True))
        for mine, its in (UP, DOWN, COPY)
    }
    table = [f"{way:14} {taken:7.2f} s {mib / taken:8.0f} MiB/s" for way, taken in rows.items()]
    table += [
        f"{who:32} {what}: {each['requests']:5} requests, {each['sent'] / 2**20:8.1f} MiB sent, {each['received'] / 2**20:8.1f} MiB received"
        for who, what_of in (("trainfold", ours), (f"torch, {theirs['over']}", theirs))
        for what, each in what_of.items()
        if what != "over"
    ]
    table += [
        f"{way:32} {each['requests']:5} requests, {each['sent'] / 2**20:8.1f} MiB sent" for way, each in sent.items()
    ]
    table.append(f"ls of {number} checkpoints: {listed} requests")
    targets = [
        Target("upload: speed / the client's own put", ratios["upload"], ">=", 0.9),
        Target("download: speed / the client's own get", ratios["download"], ">=", 0.9),
        Target("copy: speed / the client's own put of the file", ratios["copy"], ">=", 0.9),
        Target("ls: requests besides one for each checkpoint", listed - number, "<=", 20),
    ]
    return finish(
        options,
        {"machine": around, "mib": mib, "rounds": rounds, "rows": rows, "ratios": ratios,
         "requests": {"ours": ours, "torch": theirs, "copies": sent}, "ls": listed},
        targets,
        table,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""What is in memory while a large file goes up or comes down: a few parts, whatever its size."""

import subprocess
import sys

import pytest
from kit.backends.buckets.s3_cases import KEYS

PROGRAM = """
import sys
from pathlib import Path
from obstore.store import S3Store
from trainfold.stores import ObjectStore

def grown(action):
    def kib(key):
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    action()
    return (kib("VmHWM") - before) // 1024

port, key, secret = sys.argv[1:]
store = ObjectStore(S3Store("bucket", prefix="runs/memory", endpoint=f"http://127.0.0.1:{port}", region="us-east-1",
                            access_key_id=key, secret_access_key=secret, client_options={"allow_http": True}), url="s3://bucket/runs/memory")
part, size = bytes(1 << 20), 256 << 20

def up():
    store.write("step-1/a", (part for _ in range(256)), size_bytes=size)

def down():
    room = memoryview(bytearray(1 << 20))
    with store.reading("step-1/a", [(0, size)]) as read_into:
        for start in range(0, size, len(room)):
            read_into(room, start)

store.write("step-1/b", [part], size_bytes=len(part))
print(grown(up), grown(down))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_process_that_sends_and_reads_a_large_file_grows_by_a_few_parts(s3):
    """C03: 256 MiB over HTTP: the growth of the resident set at its peak."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(s3.port), KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    up, down = map(int, done.stdout.split())
    assert up < 176, "parts of 8 MiB, of which 8 are on their way, each in Python and in the client"
    assert down < 48

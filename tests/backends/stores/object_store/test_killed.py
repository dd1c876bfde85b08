"""A real process is killed at its k-th request to a server; the next one goes on from what was acknowledged."""

import subprocess
import sys
import warnings

import pytest
import torch
from kit.backends.buckets.s3_cases import KEYS, store_at

import trainfold
from trainfold.backends.runs.load import CheckpointPassedOver

PROGRAM = """
import sys
import torch, trainfold
from obstore.store import S3Store
from trainfold.stores import ObjectStore

port, run, key, secret = sys.argv[1:]
client = S3Store("bucket", prefix=run, endpoint=f"http://127.0.0.1:{port}", region="us-east-1", access_key_id=key, secret_access_key=secret,
                 client_options={"allow_http": True})
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
live = trainfold.attach(model)
with trainfold.CheckpointManager(ObjectStore(client, url="s3://bucket/" + run), every=1, keep_last=2, mode="sync") as manager:
    manager.restore(live)
    print("restored", live.progress.step, flush=True)
    for _ in range(4):
        with torch.no_grad():
            model.weight.fill_(live.progress.step + 1)
        live.advance(samples=1)
        manager.step(live)
        print("acknowledged", live.progress.step, flush=True)
"""
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("is_done", [False, True], ids=["before the server has it", "after"])
@pytest.mark.parametrize("first", range(3))
def test_a_process_that_is_killed_at_any_request_loses_nothing_acknowledged(proxy, first, is_done):
    """E01: SIGKILL at every third request, one process after the other in one run."""
    run = store_at(proxy.port).url.removeprefix("s3://bucket/")
    acknowledged, at, was_killed = 0, first + 10, True
    while was_killed:
        began, processes = len(proxy.requests), []

        def fault(number, method, path, last=began + at, processes=processes):
            if number < last or (is_done and number == last):
                return None
            processes[0].kill()
            return "cut"

        proxy.fault = fault
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(proxy.port), run, KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        processes.append(process)
        said = dict.fromkeys(("restored", "acknowledged"), None)
        for line in process.communicate()[0].splitlines():
            word, step = line.split()
            said[word] = int(step)
        was_killed = process.returncode == -9
        assert was_killed or process.returncode == 0
        if said["restored"] is not None:
            assert said["restored"] in {acknowledged, acknowledged + 1}, "an acknowledged checkpoint is lost"
            acknowledged = said["restored"]
        acknowledged = said["acknowledged"] or acknowledged
        at += 7
        proxy.fault = lambda number, method, path: None
        if acknowledged:
            check(store_at(proxy.port, run=run), acknowledged)
    assert acknowledged >= 4


def check(store, acknowledged):
    """What a reader finds is the last one that was acknowledged, or the one after it."""
    live = trainfold.attach(torch.nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointPassedOver)  # of a save that did not finish
        found = trainfold.load(store, like=live.capture(), components=("model", "trainer"))
    assert found.trainer.step in {acknowledged, acknowledged + 1}
    assert torch.equal(found.model.params["weight"], torch.full((3, 3), float(found.trainer.step)))

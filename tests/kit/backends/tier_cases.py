"""A program with a run in two tiers, and machines that are lost while it runs."""

import os
import subprocess
import sys
import time

import torch

import trainfold

LOOP = """
import sys
import torch, trainfold
from trainfold.stores import TwoTiers

near, far, last = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
live = trainfold.attach(model)

def say(event):
    if event.kind in ("fetched", "restored", "committed", "uploaded"):
        print(event.kind, event.step, flush=True)

with trainfold.CheckpointManager(TwoTiers(near, far), every=1, keep_last=2, mode="async", on_event=say) as manager:
    manager.restore(live)
    while live.progress.step < int(last):
        with torch.no_grad():
            model.weight.fill_(live.progress.step + 1)
        live.advance(samples=1)
        manager.step(live)
"""


def state_at(step, *, width=3):
    live = trainfold.attach(torch.nn.Linear(width, width))
    return live.capture().evolve(trainer=trainfold.Progress(step=step))


def until(condition):
    late = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.002)


def lose_machines(proxy, far, environ, reopen, tmp_path, *, first):
    """Start the program again and again, each time on a new disk, and kill it at some request, until it ends: it loses only what was not said to be uploaded.

    Args:
        proxy: of the far tier.
        far: its URL.
        environ: what its client needs.
        reopen: opens the far tier.
        tmp_path: for the disks.
        first: the request of the first program at which it is killed.
    """
    uploaded, committed, was_killed, at, resumed = 0, 0, True, first, []
    while was_killed:
        processes, near, until = [], tmp_path / f"disk-{at}", len(proxy.requests) + at

        def fault(number, method, path, last=until, processes=processes):
            if number < last:
                return None
            processes[0].kill()
            return "cut"

        proxy.fault = fault
        command = [sys.executable, "-c", LOOP, str(near), far, "8"]
        processes.append(
            subprocess.Popen(
                command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        )
        said = [(kind, int(step)) for kind, step in map(str.split, processes[0].communicate()[0].splitlines())]
        was_killed = processes[0].returncode == -9
        proxy.fault = lambda number, method, path: None
        assert was_killed or processes[0].returncode == 0
        for step in (step for kind, step in said if kind == "restored"):
            resumed.append(step)
            assert uploaded <= step <= committed
            assert ("fetched", step) in said
        uploaded = max([uploaded, *(step for kind, step in said if kind == "uploaded")])
        committed = max([step for kind, step in said if kind in {"restored", "committed"}], default=committed) + 1
        if uploaded:
            assert uploaded <= trainfold.load(reopen(), like=state_at(0, width=300)).trainer.step <= committed
        at += 16
    assert uploaded == 8
    assert resumed

"""The same disks with other ways to save: `torch.distributed.checkpoint`, and torch.save to a temporary file and a rename.

A rival saves the same tensors at step 1 and step 2, and is then asked for the newest that it can load, the older one
included; so it is only found wanting where what it had acknowledged is gone, cut off, or different.
"""

import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, final

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from crash.disk.effects import Effect, Mark, Recorder
from crash.disk.frozen_store import Files, materialise
from crash.disk.states import Budget, crash_states, digest_of_files
from crash.disk.syscalls import watched
from crash.saves.scenarios import SHM

State = dict[str, torch.Tensor]


def tensors_at(step: int) -> State:
    """Some blocks of bytes, different at each step."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(60, 60, generator=generator), "bias": torch.randn(300, generator=generator)}


@final
@attrs.frozen
class Rival:
    """A way to save.

    Attributes:
        save: writes the tensors of a step into a directory.
        load: reads the tensors of a step from a directory; any error means that it cannot.
    """

    save: Callable[[Path, int], None]
    load: Callable[[Path, int], State]


def _dcp_save(run: Path, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(run / f"step-{step}", sync_files=True)
        dcp.save(tensors_at(step), storage_writer=writer, no_dist=True)


def _dcp_load(run: Path, step: int) -> State:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors_at(step).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            dcp.load(found, storage_reader=dcp.FileSystemReader(run / f"step-{step}"), no_dist=True)
        finally:
            logging.disable(logging.NOTSET)
    return found


def _torch_save(run: Path, step: int, *, syncs: bool) -> None:
    temporary = run / "checkpoint.pt.tmp"
    with temporary.open("wb") as file:
        torch.save({"step": step, **tensors_at(step)}, file)
        if syncs:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(run / "checkpoint.pt")


def _torch_load(run: Path, step: int) -> State:
    found = torch.load(io.BytesIO((run / "checkpoint.pt").read_bytes()), weights_only=True)
    if found.pop("step") != step:
        raise LookupError("another step")
    return found


RIVALS: Final = {
    "dcp": Rival(_dcp_save, _dcp_load),
    "torch.save, replace": Rival(lambda run, step: _torch_save(run, step, syncs=False), _torch_load),
    "torch.save, fsync, replace": Rival(lambda run, step: _torch_save(run, step, syncs=True), _torch_load),
}


def record(rival: Rival) -> list[Effect]:
    """The effects of two saves into a directory that exists and is durable."""
    with TemporaryDirectory(dir=SHM) as top:
        recorder = Recorder(top)
        with watched(recorder):
            for step in (1, 2):
                rival.save(Path(recorder.top), step)
                recorder.mark("ack", step)
    return recorder.effects


def verdict(rival: Rival, files: Files, acknowledged: int) -> str:
    """What has become of an acknowledged save: ``whole``, ``lost``, ``torn`` or, worst of all, ``altered``."""
    with TemporaryDirectory(dir=SHM) as top:
        materialise(files, top)
        for step in (2, 1):
            try:
                found = rival.load(Path(top), step)
            except LookupError:  # another step
                continue
            except (Exception, CheckpointException):  # noqa: BLE001  # loaders raise anything; DCP's error is not an Exception
                if step == acknowledged and not is_nameless(files, step):
                    return "torn"
                continue
            if not _equal(found, tensors_at(step)):
                return "altered"
            return "whole" if step >= acknowledged else "lost"
    return "lost"


def is_nameless(files: Files, step: int) -> bool:
    """Whether even the file names are missing."""
    return not {f"step-{step}/.metadata", "checkpoint.pt"} & set(files)


def failures(rival: Rival, effects: Sequence[Effect], budget: Budget) -> Counter[str]:
    """The number of states with each verdict, after a save had returned."""
    counts: Counter[str] = Counter()
    known: dict[tuple[bytes, int], str] = {}
    acknowledged = [0]
    for effect in effects:
        acknowledged.append(effect.value if isinstance(effect, Mark) else acknowledged[-1])
    for state in crash_states(effects, budget):
        if step := acknowledged[state.done]:
            key = (digest_of_files(state.files), step)
            if key not in known:
                known[key] = verdict(rival, state.files, step)
            counts[known[key]] += 1
    return counts


def _equal(found: Any, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)

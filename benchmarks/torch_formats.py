"""Conversions between directories of distributed checkpoints and of model hubs, beside those that torch has: seconds and peak memory.

Each conversion runs in a process of its own, in turns; medians. Memory is the growth of the resident set over that before the conversion. This library
and torch's writers sync their files; `dcp_to_torch_save` does not.

`convert.py` measures how long plans take.

    python benchmarks/torch_formats.py [--quick] [--json] [--check] [--mib 2048] [--rounds 3] [--directory DIR]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from _targets import Target, finish, machine, make_parser

COPY = "plain copy"
DCP_TO_HF = (
    "ours: dcp -> hf",
    "torch: dcp_to_torch_save",
    "torch: dcp -> HuggingFaceStorageWriter",
    "torch: ... and consolidation",
)
HF_TO_DCP = ("ours: hf -> dcp", "torch: HuggingFaceStorageReader -> dcp")


def tensors(mib):
    """Layers of a 32nd in bfloat16, and one tensor of a 16th, as embeddings are larger than layers."""
    generator = torch.Generator().manual_seed(0)
    sizes = [mib * 64, *[mib * 32] * 30]  # KiB
    return {
        f"layers.{number}.weight": torch.randn(size // 2, 1024, generator=generator).bfloat16()
        for number, size in enumerate(sizes)
    }


def prepare(folder, mib):
    """A directory of each format, with the same tensors."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    state = tensors(mib)
    (folder / "hf").mkdir()
    save_file(state, folder / "hf" / "model.safetensors")
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)


def in_memory(folder):
    """What torch's reader makes of a directory of distributed checkpoints."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def convert(which, folder, target):
    """Run one conversion."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

    from trainfold.weights import DcpDirectory, HubDirectory, write_dcp_directory, write_hub_directory

    def to_hub(**options):
        dcp.save(
            in_memory(folder / "dcp"), storage_writer=HuggingFaceStorageWriter(str(target), **options), no_dist=True
        )

    def from_hub():
        reader = HuggingFaceStorageReader(str(folder / "hf"))
        listed = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in listed.items()}
        dcp.load(state, storage_reader=reader, no_dist=True)
        dcp.save(state, checkpoint_id=target, no_dist=True)

    def copy():
        target.mkdir()
        for each in (folder / "dcp").iterdir():
            shutil.copyfile(each, target / each.name)
            with (target / each.name).open("rb+") as file:
                os.fsync(file.fileno())

    work = {
        COPY: copy,
        DCP_TO_HF[0]: lambda: write_hub_directory(DcpDirectory(folder / "dcp"), target),
        DCP_TO_HF[1]: lambda: dcp_to_torch_save(folder / "dcp", target),
        DCP_TO_HF[2]: to_hub,
        DCP_TO_HF[3]: lambda: to_hub(save_distributed=True, enable_consolidation=True),
        HF_TO_DCP[0]: lambda: write_dcp_directory(target, HubDirectory(folder / "hf"), model=""),
        HF_TO_DCP[1]: from_hub,
    }[which]
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted from here
    began = time.perf_counter()
    work()
    return {"secs": time.perf_counter() - began, "mib": (memory("VmHWM") - before) / 1024}


def memory(key):
    """A line of the process's status, in KiB."""
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )


def main():
    """Run all conversions in turns."""
    parser = make_parser(__doc__, quick="16 MiB, once")
    parser.add_argument("--mib", type=int, default=2048, help="the size of the weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="a place on the filesystem to measure")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    around = machine()
    warnings.simplefilter("ignore")  # of torch, that this is one process
    mib, rounds = (16, 1) if options.quick else (options.mib, options.rounds)
    if options.only is not None:
        if options.only == "prepare":
            prepare(options.directory, options.mib)
        else:
            print(json.dumps(convert(options.only, options.directory, options.directory / "target")))
        return 0
    found = {}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as top:
        command = [sys.executable, __file__, "--directory", top, "--mib", str(mib), "--only"]
        subprocess.run([*command, "prepare"], check=True)
        for _ in range(rounds):
            for which in (COPY, *DCP_TO_HF, *HF_TO_DCP):
                done = subprocess.run([*command, which], check=True, capture_output=True, text=True)
                found.setdefault(which, []).append(json.loads(done.stdout))
                target = Path(top, "target")
                shutil.rmtree(target) if target.is_dir() else target.unlink()
    rows = {
        which: {key: statistics.median(run[key] for run in runs) for key in ("secs", "mib")}
        for which, runs in found.items()
    }
    table = [
        f"{which:44} {row['secs']:7.2f} s {mib / row['secs']:8.0f} MiB/s {row['mib']:8.0f} MiB of memory"
        for which, row in rows.items()
    ]
    targets = []
    for ours, *theirs in (DCP_TO_HF, HF_TO_DCP):
        secs, used = (min(rows[each][key] for each in theirs) for key in ("secs", "mib"))
        targets += [
            Target(f"{ours}: time / the fastest of torch", rows[ours]["secs"] / secs, "<=", 1.0),
            Target(f"{ours}: throughput / a plain copy", rows[COPY]["secs"] / rows[ours]["secs"], ">=", 0.7),
            Target(f"{ours}: memory, MiB", rows[ours]["mib"], "<=", 2 * mib / 16 + 128),
            Target(f"{ours}: memory / the least of torch", rows[ours]["mib"] / used, "<=", 0.1),
        ]
    return finish(options, {"machine": around, "mib": mib, "rounds": rounds, "rows": rows}, targets, table)


if __name__ == "__main__":
    sys.exit(main())

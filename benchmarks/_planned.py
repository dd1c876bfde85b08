"""Sources of many tensors, as the programs write them whose formats they are, and the CPU time until a conversion of each is planned."""

import gc
import time
import warnings

import torch
from _forked import forked

from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source

SOURCES = ("hf", "run", "x.pt", "dcp", "dcp, nested", "dcp, optimizer")
TARGETS = ("native", "hf", "dcp")
_SHAPES = ((8, 8), (8,), (16, 8), (4, 2, 2))
_FEW = 200


def prepare_sources(folder, names):
    """A source of each kind with so many tensors; that with an optimizer has a third of them in its model."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    warnings.simplefilter("ignore")  # of torch, that this is one process
    folder.mkdir(parents=True)
    model = {f"layers.{n // 10}.part{n % 10}.weight": torch.full(_SHAPES[n % 4], float(n)).bfloat16() for n in range(names)}  # fmt: skip
    few = dict(list(model.items())[: names // 3])
    slots = {name: {"exp_avg": each, "exp_avg_sq": each} for name, each in few.items()}
    (folder / "hf").mkdir()
    save_file(model, folder / "hf" / "model.safetensors")
    run_conversion(plan_conversion(open_source(folder / "hf"), folder / "run", to="native"))
    torch.save({"model": model, "step": 3}, folder / "x.pt")
    optimizer = {"state": slots, "param_groups": [{"lr": 1e-3, "params": list(few)}]}
    for name, state in (
        ("dcp", model),
        ("dcp, nested", {"model": model}),
        ("dcp, optimizer", {"model": few, "optim": optimizer, "step": 5}),
    ):
        dcp.save(state, checkpoint_id=folder / name, no_dist=True)


def planned(folder, source, to):
    """The CPU seconds from a path to the plan, in this process."""
    gc.collect()
    began = time.process_time()
    plan_conversion(open_source(folder / source), folder / "target", to=to)
    return {"cpu_secs": time.process_time() - began}


def measure_plans(folder, names, rounds):
    """A row for each source and target: the least CPU seconds of a process that has imported everything and read nothing yet."""
    forked(lambda: prepare_sources(folder / "few", min(_FEW, names)))
    forked(lambda: prepare_sources(folder / "many", names))
    for source in SOURCES:  # so that all that is needed is imported
        for to in TARGETS:
            planned(folder / "few", source, to)
    rows = []
    for source in SOURCES:
        for to in TARGETS:
            found = [
                forked(lambda source=source, to=to: planned(folder / "many", source, to)) for _ in range(max(3, rounds))
            ]
            rows.append({"source": source, "to": to, "cpu_secs": min(each["cpu_secs"] for each in found)})
    return {"tensors": names, "rows": rows}

"""Sources of many tensors, as the programs write them whose formats they are, and the CPU time until a conversion of each is planned."""

import gc
import json
import time
import warnings

import torch
from _forked import forked

from trainfold.backends.convert.conversion_run import plan_conversion, run_conversion
from trainfold.backends.convert.opened_source import open_source

SOURCES = ("hf", "run", "x.pt", "dcp", "dcp, nested", "dcp, optimizer")
TARGETS = ("native", "hf", "dcp")
RULED = (("llama, hf", "native"), ("llama, hf", "dcp"), ("llama, run", "hf"), ("llama, dcp", "hf"))
"""Pairs between which names and rows are translated by the rules of a family."""

_LLAMA = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16), "input_layernorm": (8,), "post_attention_layernorm": (8,),
}  # fmt: skip
_CONFIG = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
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


def prepare_llama(folder, names):
    """A Llama with so many tensors: a hub directory, and a run and a directory of torch with the names of Meta's code."""
    from safetensors.torch import save_file

    warnings.simplefilter("ignore")
    hub, run, torch_directory = (folder / f"llama, {each}" for each in ("hf", "run", "dcp"))
    shapes = {f"model.layers.{layer}.{name}.weight": each for layer in range(names // len(_LLAMA)) for name, each in _LLAMA.items()}  # fmt: skip
    shapes |= {"model.embed_tokens.weight": (8, 8), "lm_head.weight": (8, 8), "model.norm.weight": (8,)}
    hub.mkdir()
    save_file({name: torch.zeros(each, dtype=torch.bfloat16) for name, each in shapes.items()}, hub / "model.safetensors")  # fmt: skip
    (hub / "config.json").write_text(json.dumps(_CONFIG))
    run_conversion(plan_conversion(open_source(hub), run, to="native", rules="llama"))
    run_conversion(plan_conversion(open_source(run), torch_directory, to="dcp"))


def planned(folder, source, to):
    """The CPU seconds from a path to the plan, in this process."""
    rules = {"rules": "llama", "like": folder / "llama, hf" / "config.json"} if (source, to) in RULED else {}
    gc.collect()
    began = time.process_time()
    plan_conversion(open_source(folder / source), folder / "target", to=to, **rules)
    return {"cpu_secs": time.process_time() - began}


def measure_plans(folder, names, rounds):
    """A row for each source and target: the least CPU seconds of a process that has imported everything and read nothing yet."""
    for place, count in (("few", min(_FEW, names)), ("many", names)):
        forked(lambda place=place, count=count: prepare_sources(folder / place, count))
        forked(lambda place=place, count=count: prepare_llama(folder / place, count))
    pairs = [*((source, to) for source in SOURCES for to in TARGETS), *RULED]
    for source, to in pairs:  # so that all that is needed is imported
        planned(folder / "few", source, to)
    rows = []
    for source, to in pairs:
        found = [
            forked(lambda source=source, to=to: planned(folder / "many", source, to)) for _ in range(max(3, rounds))
        ]
        rows.append({"source": source, "to": to, "cpu_secs": min(each["cpu_secs"] for each in found)})
    return {"tensors": names, "rows": rows}

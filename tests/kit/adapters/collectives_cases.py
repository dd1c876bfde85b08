"""Counts the collectives that torch really starts on a rank."""

from torch.profiler import ProfilerActivity, profile

_NAMES = {"allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "allgather": "all_gather"}


def collectives_of(run):
    """How many all-reduces, reduce-scatters and all-gathers of tensors ``run()`` starts, by name."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    found = dict.fromkeys(_NAMES.values(), 0)
    for event in profiler.key_averages():
        for part, name in _NAMES.items():
            if event.key.startswith("c10d::") and part in event.key:
                found[name] += event.count
    return found

"""What Lightning has in memory and does not save: the sums of what an epoch has logged, and the states of its metrics."""

from typing import Any

import torch


def is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two state dicts have the same tensors in the same memory, and nothing else."""
    return one.keys() == other.keys() and all(
        isinstance(value, torch.Tensor)
        and value.data_ptr() == other[name].data_ptr()
        and value.shape == other[name].shape
        for name, value in one.items()
    )


def states_of_metrics(module: Any) -> dict[str, Any]:
    """What the metrics of torchmetrics in a module have counted in the epoch so far; they do not save it by themselves."""
    return {
        name: {**each.metric_state, "_update_count": each._update_count, "_computed": None}  # noqa: SLF001 - it has no public name
        for name, each in module.named_modules()
        if hasattr(type(each), "metric_state")
    }


def sums_of(trainer: Any) -> dict[str, Any]:
    """What the epoch has logged so far, for its averages; Lightning does not save it."""
    logged = trainer.fit_loop.epoch_loop._results  # noqa: SLF001 - it has no public name
    return {
        key: {name: getattr(each, name) for name in ("value", "cumulated_batch_size") if hasattr(each, name)}
        for key, each in logged.items()
        if each.is_tensor and each.meta.on_epoch and each.update_called
    }


def add_sums(trainer: Any, sums: dict[str, Any]) -> dict[str, Any]:
    """Add what an epoch had logged before a resume to what it has logged since, and return what it has not logged again yet."""
    logged = trainer.fit_loop.epoch_loop._results if sums else {}  # noqa: SLF001 - it has no public name
    for key in sums.keys() & logged.keys():
        each, meta = logged[key], logged[key].meta
        how = meta.reduce_fx if meta.is_max_reduction or meta.is_min_reduction else torch.add
        for name, value in sums[key].items():
            setattr(each, name, how(value.to(each.value.device), getattr(each, name)))
        each._computed = None  # noqa: SLF001 - its cache
    return {key: each for key, each in sums.items() if key not in logged}

"""Reads the settings of attached objects and loaders at the attach, for the resume contract."""

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Subset, SubsetRandomSampler, WeightedRandomSampler

from trainfold.adapters.batches.feed import length_of
from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.adapters.components.component import Stateful
from trainfold.adapters.components.module_settings import settings_of_modules
from trainfold.adapters.components.schedule_settings import settings_of_object
from trainfold.adapters.loaders.choose import loaders_by_path
from trainfold.adapters.script.script_contract import bare
from trainfold.adapters.streams.generator import is_generator
from trainfold.adapters.streams.rng_streams import preserved_rng
from trainfold.backends.ranks.launcher import warn_for_all
from trainfold.backends.runs.load import ResumeDrift
from trainfold.backends.side.side_files import SideFiles
from trainfold.core.digest import digest_of
from trainfold.core.json_values import Json
from trainfold.core.resume.drift import Drift, DriftAction, make_drift
from trainfold.core.state.contract import checked_contract
from trainfold.core.state.contract_kinds import contract_kind

_MOST: Final = 1 << 20  # elements that a digest reads; of more, this many evenly spaced ones
_ATTACHED: Final = "attached."
_SHARES: Final = ("num_replicas", "world_size", "rank")  # attributes of a sampler that gives each rank a share
_KNOWN: Final = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)  # the contract has more about these


def attached_settings(extra: Mapping[str, Any], loader: Any, *, is_part: bool = False) -> dict[str, Json]:
    """Contract key -> plain value, for the objects under ``extra`` and for the samplers and datasets of the loaders.

    Nothing changes: if an object's code draws random numbers to return its state, the random streams are put back.

    Args:
        extra: the other attached objects of the run.
        loader: a loader, several by name, or None.
        is_part: whether other ranks have other parts of the modules.

    Examples:
        >>> attached_settings({"scaler": torch.amp.GradScaler("cpu")}, None)["attached.scaler.growth_interval"]
        2000
        >>> loader = torch.utils.data.DataLoader([1, 2, 3, 4])
        >>> attached_settings({}, {"labelled": loader})
        {"attached.loader['labelled'].sampler_size": 4}
    """
    found: dict[str, Json] = {}
    with preserved_rng() if extra else contextlib.nullcontext():
        for name, each in extra.items():
            target = bare(each)
            if isinstance(target, Stateful | torch.nn.Module) and not (
                isinstance(target, _KNOWN) or is_generator(target)
            ):
                found |= settings_of_object(target, f"attached.{name}")
            if isinstance(target, SideFiles):
                found |= target.settings(f"attached.{name}")
            if isinstance(target, torch.nn.Module):
                found |= settings_of_modules(target, f"attached.{name}", is_part=is_part)
    for path, each in loaders_by_path(loader).items():
        found |= {f"attached.{path}.{key}": value for key, value in _samples(each).items()}
    return found


def saved_settings(contract: Mapping[str, Json], name: str) -> dict[str, Json]:
    """The settings of one object under ``extra``, from the contract of a checkpoint.

    Examples:
        >>> saved_settings({"attached.ema.decay": 0.9, "attached.emas.decay": 0.5}, "ema")
        {'attached.ema.decay': 0.9}
    """
    return {key: value for key, value in contract.items() if key.startswith(f"{_ATTACHED}{name}.")}


def changed_settings(
    saved: Mapping[str, Json], now: Mapping[str, Json], policy: Mapping[str, DriftAction]
) -> tuple[Drift, ...]:
    """The settings of an object that differ from the checkpoint; empty if the checkpoint has no settings of the object.

    Args:
        saved: from `saved_settings`.
        now: from `attached_settings`.
        policy: the policy of the restore.
    """
    now = checked_contract(now)
    return tuple(
        make_drift(
            contract_kind(key), key, saved=saved.get(key, "nothing"), wanted=now.get(key, "nothing"), policy=policy
        )
        for key in (sorted({*saved, *now}) if saved else ())
        if saved.get(key) != now.get(key)
    )


def warn_changed(drifts: tuple[Drift, ...]) -> None:
    """Warn about each drift that the policy neither refuses nor accepts."""
    for drift in drifts:
        if drift.verdict == "warn":
            warn_for_all(str(drift), ResumeDrift)


def _samples(loader: Any) -> dict[str, Json]:
    """How many samples a loader's sampler draws, how, with which weights, and from which subset."""
    sampler, found = getattr(loader, "sampler", None), dict[str, Json]()
    if sampler is not None and not any(hasattr(sampler, name) for name in _SHARES):
        with contextlib.suppress(Exception):  # a sampler of the user's
            found["sampler_size"] = length_of(sampler)
    outer = getattr(loader, "batch_sampler", None)
    if own := _sampler_settings(outer if isinstance(outer, GlobalBatchSampler) else sampler):
        found["sampler_settings"] = own
    if isinstance(sampler, WeightedRandomSampler):
        found["sampler_weights"] = _digest(sampler.weights)
    if isinstance(sampler, SubsetRandomSampler):
        found["sampler_indices"] = _digest(sampler.indices)
    dataset, subsets = getattr(loader, "dataset", None), list[str]()
    while isinstance(dataset, Subset):
        subsets.append(_digest(dataset.indices) or "unknown")
        dataset = dataset.dataset
    if subsets:
        found["subset_indices"] = subsets[0] if len(subsets) == 1 else list(subsets)
    return {key: value for key, value in found.items() if value is not None}


def _sampler_settings(sampler: Any) -> dict[str, Json]:
    """The arguments of one of torch's samplers. The default ``replacement`` is left out, because older checkpoints do not have it."""
    if type(sampler) in (DistributedSampler, GlobalBatchSampler):
        return {"shuffle": bool(sampler.shuffle), "seed": int(sampler.seed), "drop_last": bool(sampler.drop_last)}
    return {"replacement": True} if type(sampler) is RandomSampler and sampler.replacement else {}


def _digest(numbers: Any) -> str | None:
    """A digest of a sequence of numbers; None for anything else."""
    try:
        length = len(numbers)
        some = numbers[:: max(1, -(-length // _MOST))]
        held = some.detach().cpu().numpy() if isinstance(some, torch.Tensor) else np.asarray(some)
    except Exception:  # noqa: BLE001 (a sequence of the user's)
        return None
    if held.dtype.kind not in "biuf":
        return None
    held = np.ascontiguousarray(held, dtype=np.float64 if held.dtype.kind == "f" else np.int64)
    return f"{length} of them, {digest_of(held.tobytes())}"

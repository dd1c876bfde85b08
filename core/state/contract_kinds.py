"""Kinds of contract keys: the subject of each key, which keys only rank 0 compares, which settings ranks have alike, and what a state carries for its next step."""

import re
from collections.abc import Mapping
from typing import Final

from trainfold.core.json_values import Json

_OWNERS: Mapping[str, str] = {"optimizer": "hyperparameters", "dataset": "dataset", "environment": "environment"}
# The base rates that a scheduler writes into the groups of its optimizer.
BASE_RATES: Final = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
# The key that a torch scheduler adds to a param group -> the hyperparameters that it then changes at each step.
SCHEDULED: Final[Mapping[str, frozenset[str]]] = {
    "initial_lr": frozenset({"lr"}),
    "max_momentum": frozenset({"momentum", "betas"}),
}
# hyperparameters that have kinds of their own; foreach= is how torch walks through the parameters, and the algorithm is the same
_OF_GROUPS: Final = {**dict.fromkeys(BASE_RATES, "scheduler"), "foreach": "implementation"}
STEP_PREFIX: Final = "step."
OUTSIDE: Final = "outside_weights"  # the kind of the fingerprint of frozen weights that no checkpoint has
OF_RANK_ZERO: Final = frozenset({"environment", "settings", "samples", "files"})  # kinds that only rank 0 compares
# The last parts of keys about the ranks that train a module.
RANKS: Final = "(ranks)"  # their mesh
WRAPPER: Final = "(wrapper)"  # DDP or FSDP2, where their sums have other bits
BUCKETS: Final = "(buckets)"  # how much DDP sums at once
PARTS: Final = "(parts)"  # a digest of the precisions of more parts than `(precision)` lists
DIVISORS: Final = "(divisors)"  # of each part, where `(divisor)` has several numbers
OF_MESH: Final = (RANKS, WRAPPER, BUCKETS)  # another number of ranks has others
OF_LATER: Final = (RANKS, WRAPPER, BUCKETS, PARTS, DIVISORS)  # older checkpoints do not have them
_OF_A_RANK: Final = frozenset(["rank", "ranks", "device", "seed", "time", "pid", "host", "port"])  # words in names
_WORD: Final = re.compile("[a-z]+")
_FILE: Final = re.compile(r"^attached\.\w+\.files\[")  # the digest of a file that the run reads
_GROUPED: Final = re.compile(r"^attached\.\w+\.(groups|held)\[")  # a hyperparameter of an attached optimizer


def is_of_rank_zero(key: str) -> bool:
    """Whether only rank 0 compares a key, because its value may differ between ranks: an environment, a share, a device.

    Examples:
        >>> is_of_rank_zero("environment.threads"), is_of_rank_zero("attached.scaler.growth_interval"), is_of_rank_zero("batch_size")
        (True, True, False)
        >>> is_of_rank_zero("dataset_size")  # each rank saves and compares the position of its loader, which includes the length
        True
    """
    return key == "dataset_size" or contract_kind(key) in OF_RANK_ZERO


def contract_kind(key: str) -> str:
    """Return the kind of drift of a contract key.

    Examples:
        >>> contract_kind("scheduler.total"), contract_kind("batch_size"), contract_kind("tokenizer")
        ('horizon', 'batch_size', 'contract')
        >>> contract_kind("attached.scheduler.T_max"), contract_kind("attached.scheduler.own.total")
        ('scheduler', 'scheduler_own')
        >>> contract_kind("optimizer.groups['w'].foreach"), contract_kind("attached.discriminator.groups['w'].foreach")
        ('implementation', 'implementation')
        >>> contract_kind("attached.ema.decay"), contract_kind("attached.loader.sampler_size")
        ('settings', 'samples')
        >>> contract_kind("attached.tokenizer.files['tokenizer.json']")
        'files'
    """
    exact = {
        "weights.outside": "outside_weights",
        "optimizer.kind": "optimizer",
        "dataset.length": "dataset_size",
        "dataset_size": "dataset_size",
    }
    if key in exact:
        return exact[key]
    last = key.rpartition(".")[2]
    if key.startswith("attached.") and (kind := _attached_kind(key)) is not None:
        return kind
    if ".groups[" in key and last in _OF_GROUPS:
        return _OF_GROUPS[last]
    if key.startswith("scheduler."):
        return "horizon" if last in {"total", "horizon", "total_steps"} else "schedule"
    owner = key.partition(".")[0]
    if owner != key and owner in _OWNERS:
        return _OWNERS[owner]
    name = key.removeprefix("step.")
    return name if name in {"batch_size", "accumulate", "horizon"} else "contract"


def prefix_of_optimizer(component: str) -> str:
    """Return what the keys of an optimizer begin with.

    Examples:
        >>> prefix_of_optimizer("optimizer"), prefix_of_optimizer("discriminator")
        ('optimizer', 'attached.discriminator')
    """
    return component if component == "optimizer" else f"attached.{component}"


def shared_settings(contract: Mapping[str, Json], component: str) -> dict[str, Json]:
    """Return the settings of an attached object that ranks must have alike, each under a key of its own.

    Attributes whose names say that they are of one rank, such as ``local_rank``, are left out, and so are texts of objects that are not
    torch's: one may be the path of a log.

    Args:
        contract: of a rank.
        component: of the object.

    Examples:
        >>> shared_settings({"attached.model.h.*": {"p": 0.1, "tp_rank": 1}, "attached.meter.limit": 2}, "model")
        {'attached.model.h.*.p': 0.1}
    """
    found: dict[str, Json] = {}
    for key, value in contract.items():
        if key.startswith(f"attached.{component}.") and contract_kind(key) == "settings":
            is_place = isinstance(value, dict)
            found |= {f"{key}.{name}": each for name, each in value.items()} if is_place else {key: value}
    return {key: value for key, value in found.items() if not _is_of_one_rank(key, value)}


def _is_of_one_rank(key: str, value: Json) -> bool:
    last = key.rpartition(".")[2]
    if not _OF_A_RANK.isdisjoint(_WORD.findall(last.lower())):
        return True
    return isinstance(value, str) and key.count(".") == 2 and last != "kind" and not last.endswith(")")


def step_contract(contract: Mapping[str, Json]) -> dict[str, Json]:
    """Return the part of a saved contract that a state carries for its next step.

    Examples:
        >>> step_contract({"step.accumulate": 4, "batch_size": 8})
        {'step.accumulate': 4}
    """
    return {key: value for key, value in contract.items() if key.startswith(STEP_PREFIX)}


def run_contract(contract: Mapping[str, Json]) -> dict[str, Json]:
    """Return the rest of a contract: what a state records of the run around it, such as a captured state of its loader.

    Examples:
        >>> run_contract({"step.accumulate": 4, "batch_size": 8})
        {'batch_size': 8}
    """
    return {key: value for key, value in contract.items() if not key.startswith(STEP_PREFIX)}


def _attached_kind(key: str) -> str | None:
    """Return the kind of a key about an attached object; None for the groups of an optimizer and the frozen parameters."""
    if key.startswith(("attached.scheduler.", "attached.scheduler[")):
        named = key.removeprefix("attached.scheduler").rpartition("]")[2]  # the rest, after the name of the scheduler
        if "(" in named:  # a function, or a value in an object of a user's class
            return "schedule_function"
        return "scheduler_own" if named.startswith(".own.") else "scheduler"
    if key.startswith(("attached.loader.", "attached.loader[")):
        return "samples"
    if _FILE.match(key):
        return "files"
    return None if _GROUPED.search(key) or key == "attached.optimizer.frozen" else "settings"

"""Notes: entries of a contract that do not restrict a resume: unsaved state, trained parameters, orders of sums, clipping, first learning rates, the origin of weights."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from trainfold.core.state.audit import UNSAVED
from trainfold.core.state.contract_kinds import contract_kind, is_of_rank_zero

RATES: Final = "rates"  # the key of the contract for them; never compared
RATES_KEPT: Final = 3

CONVERTED: Final = "converted"  # the key of the contract: of which format and path a checkpoint was made, and how; never compared, and not restored

TRAINED: Final = "requires_grad"  # the key of the contract; restored, and never compared

ORDERS: Final = "gradient_orders"  # the key of the contract; restored, and never compared

CLIP_NORM: Final = "live.check.clip_norm"  # the key of the contract; restored, and compared by `Live.check`

LINEAGE: Final = "weights.from"  # the key of the contract: where the weights came from; restored, and never compared

_ATTACHED: Final = "attached."
WEIGHTED: Final = "live.check.weight"  # so too: whether there is one
SCHEDULE: Final = "live.check.schedule"  # so too: the microbatches of a pipeline, and what it divides gradients by
FROZEN_LIST: Final = "frozen"  # the key of the contract: the frozen parameters, where `attached.optimizer.frozen` has a digest of many; never compared, because that is
RAMP: Final = "live.microbatch.of"  # so too, by `Live.microbatch`: the schedule, if it is one
NOTES: Final = frozenset({UNSAVED, TRAINED, ORDERS, CLIP_NORM, WEIGHTED, SCHEDULE, RAMP, LINEAGE, FROZEN_LIST})


def is_of_each_rank(key: str) -> bool:
    """Whether a key of the contract may differ between ranks, such as the device, the share of the data, or the list of unsaved state.

    Examples:
        >>> is_of_each_rank("environment.threads"), is_of_each_rank("unsaved"), is_of_each_rank("batch_size")
        (True, True, False)
    """
    return key.startswith((UNSAVED, RATES)) or is_of_rank_zero(key)


def notes_of(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes of a contract.

    Examples:
        >>> notes_of({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'unsaved': {'model.p': 'a number'}}
    """
    return {key: value for key, value in contract.items() if key in NOTES}


def settings_of_later(contract: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's settings of objects that this run has not attached yet, and that are therefore not compared yet.

    Args:
        contract: the contract of the checkpoint.
        known: the contract of the run.

    Examples:
        >>> settings_of_later({"attached.ema.decay": 0.9, "attached.model.p": 0.5}, {"attached.model.p": 0.5})
        {'attached.ema.decay': 0.9}
    """
    owners = {_owner(key) for key in known if key.startswith(_ATTACHED)}
    if not owners:  # a pure step attaches nothing
        return {}
    return {
        key: value
        for key, value in contract.items()
        if contract_kind(key) in ("settings", "files") and _owner(key) not in owners
    }


def _owner(key: str) -> str:
    return key.removeprefix(_ATTACHED).partition(".")[0]


def without_notes(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Return a contract without its notes.

    Examples:
        >>> without_notes({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'batch_size': 8}
    """
    return {key: value for key, value in contract.items() if key not in NOTES}


def trained_of(contract: Mapping[str, object], components: Collection[str] | None) -> dict[str, bool]:
    """Return parameter -> whether it was trained at the save, for parameters that changed since they were attached.

    Args:
        contract: the contract of the checkpoint.
        components: the components to include; None for all.

    Examples:
        >>> trained_of({"requires_grad": {"model.0.weight": True, "ema.w": False}, "batch_size": 8}, ["model"])
        {'model.0.weight': True}
    """
    noted = contract.get(TRAINED)
    pairs = noted.items() if isinstance(noted, Mapping) else ()
    return {
        str(path): value
        for path, value in pairs
        if type(value) is bool and (components is None or str(path).split(".", maxsplit=1)[0] in components)
    }


def gradient_orders_of(contract: Mapping[str, object]) -> dict[str, str]:
    """Return the order in which each DDP wrapper sums gradients: its name -> the indices of its parameters.

    Args:
        contract: of a checkpoint.

    Examples:
        >>> gradient_orders_of({"gradient_orders": {"model": "1 0", "ema": "0x1"}}), gradient_orders_of({})
        ({'model': '1 0'}, {})
    """
    noted = contract.get(ORDERS)
    pairs = noted.items() if isinstance(noted, Mapping) else ()
    return {
        str(name): text
        for name, text in pairs
        if isinstance(text, str) and all(each.isascii() and each.isdigit() for each in text.split())
    }


def put_back_text(changed: Mapping[str, bool], *, shown: int = 8) -> str:
    """Return the log message for a restored ``requires_grad``: each parameter by name, and how to change it.

    Args:
        changed: parameter -> whether it is trained from now on.
        shown: the number of parameters to list.

    Examples:
        >>> print(put_back_text({"model.0.weight": True, "model.0.bias": True}))
        requires_grad is as it was when the run was saved, and not as the script has attached it: model.0.weight (trained), \
model.0.bias (trained); set it in the loop to change it
    """
    listed = [f"{path} ({'trained' if value else 'frozen'})" for path, value in list(changed.items())[:shown]]
    more = [f"and {len(changed) - shown} more"] if len(changed) > shown else []
    return (
        "requires_grad is as it was when the run was saved, and not as the script has attached it: "
        f"{', '.join([*listed, *more])}; set it in the loop to change it"
    )


def with_rate(began: Sequence[float], rate: float) -> list[float]:
    """Append a rate to the first rates of a run, one for each change.

    Examples:
        >>> with_rate([0.1], 0.1), with_rate([0.1], 0.09), with_rate([0.1, 0.09, 0.08], 0.07)
        ([0.1], [0.1, 0.09], [0.1, 0.09, 0.08])
    """
    if len(began) >= RATES_KEPT or (began and began[-1] == rate):
        return list(began)
    return [*began, rate]


def restarts(began: Sequence[float], saved: float, first: float) -> bool:
    """Whether a rate's first change after a resume jumps back to the first rates of the run, because its schedule has restarted.

    A rate that is computed from the step continues, so its first change is a different one.

    Args:
        began: the first rates of the run, one for each change.
        saved: the rate in the checkpoint.
        first: the rate after the first change that follows the resume.

    Examples:
        >>> restarts([0.1, 0.09, 0.081], 0.05, 0.09), restarts([0.1, 0.09, 0.081], 0.05, 0.045)
        (True, False)
    """
    return len(began) > 1 and saved not in began and first in began[:2]

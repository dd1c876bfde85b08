"""Notes: what a checkpoint says of itself in the contract that is no condition of a resume: what is unsaved, who is trained, which rates."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from trainfold.core.state.audit import UNSAVED
from trainfold.core.state.contract_kinds import contract_kind

RATES: Final = "rates"  # the key of the contract under which a manifest lists them; it is never compared
RATES_KEPT: Final = 3

TRAINED: Final = "requires_grad"  # the key of the contract; it is put back, and never compared

_ATTACHED: Final = "attached."
NOTES: Final = frozenset({UNSAVED, TRAINED})


def notes_of(contract: Mapping[str, Any]) -> dict[str, Any]:
    """The notes of a contract.

    Examples:
        >>> notes_of({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'unsaved': {'model.p': 'a number'}}
    """
    return {key: value for key, value in contract.items() if key in NOTES}


def settings_of_later(contract: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of objects that this run may attach after the restore: no condition of a resume yet.

    Args:
        contract: of the checkpoint.
        known: what the run says of itself.

    Examples:
        >>> settings_of_later({"attached.ema.decay": 0.9, "attached.model.p": 0.5}, {"attached.model.p": 0.5})
        {'attached.ema.decay': 0.9}
    """
    owners = {_owner(key) for key in known if key.startswith(_ATTACHED)}
    if not owners:  # a pure step attaches nothing
        return {}
    return {
        key: value for key, value in contract.items() if contract_kind(key) == "settings" and _owner(key) not in owners
    }


def _owner(key: str) -> str:
    return key.removeprefix(_ATTACHED).partition(".")[0]


def without_notes(contract: Mapping[str, Any]) -> dict[str, Any]:
    """All but the notes.

    Examples:
        >>> without_notes({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'batch_size': 8}
    """
    return {key: value for key, value in contract.items() if key not in NOTES}


def trained_of(contract: Mapping[str, object], components: Collection[str] | None) -> dict[str, bool]:
    """Parameter -> whether it was trained when it was saved, of those that had changed since they were attached.

    Args:
        contract: of the checkpoint.
        components: which of them; None for all.

    Examples:
        >>> trained_of({"requires_grad": {"model.0.weight": True, "ema.w": False}, "batch_size": 8}, ["model"])
        {'model.0.weight': True}
    """
    said = contract.get(TRAINED)
    pairs = said.items() if isinstance(said, Mapping) else ()
    return {
        str(path): value
        for path, value in pairs
        if type(value) is bool and (components is None or str(path).split(".", maxsplit=1)[0] in components)
    }


def put_back_text(changed: Mapping[str, bool], *, shown: int = 8) -> str:
    """What a person hears: each parameter by name, and how to have it otherwise.

    Args:
        changed: parameter -> whether it is trained from now on.
        shown: how many are listed.

    Examples:
        >>> print(put_back_text({"model.0.weight": True, "model.0.bias": True}))
        requires_grad is as it was when the run was saved, and not as the script has attached it: model.0.weight (trained), \
model.0.bias (trained); set it in the loop to have it otherwise
    """
    listed = [f"{path} ({'trained' if value else 'frozen'})" for path, value in list(changed.items())[:shown]]
    more = [f"and {len(changed) - shown} more"] if len(changed) > shown else []
    return (
        "requires_grad is as it was when the run was saved, and not as the script has attached it: "
        f"{', '.join([*listed, *more])}; set it in the loop to have it otherwise"
    )


def with_rate(began: Sequence[float], rate: float) -> list[float]:
    """The first rates of a run, one for each change, with one more.

    Examples:
        >>> with_rate([0.1], 0.1), with_rate([0.1], 0.09), with_rate([0.1, 0.09, 0.08], 0.07)
        ([0.1], [0.1, 0.09], [0.1, 0.09, 0.08])
    """
    if len(began) >= RATES_KEPT or (began and began[-1] == rate):
        return list(began)
    return [*began, rate]


def begins_anew(began: Sequence[float], saved: float, first: float) -> bool:
    """Whether the first change of a rate after a resume leads back to where the run began, from a rate that it did not begin with.

    A rate that is computed from the step goes on, so that its first change is another one.

    Args:
        began: the first rates of the run, one for each change.
        saved: the rate of the checkpoint.
        first: the rate after the first change that follows the resume.

    Examples:
        >>> begins_anew([0.1, 0.09, 0.081], 0.05, 0.09), begins_anew([0.1, 0.09, 0.081], 0.05, 0.045)
        (True, False)
    """
    return len(began) > 1 and saved not in began and first in began[:2]

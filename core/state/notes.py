"""Notes: what a checkpoint says of itself in the contract that is no condition of a resume, and is never compared."""

from collections.abc import Mapping
from typing import Any, Final

from trainfold.core.resume.drift import contract_kind
from trainfold.core.state.audit import UNSAVED
from trainfold.core.state.trained import TRAINED

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

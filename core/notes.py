"""Notes: what a checkpoint says of itself in the contract that is no condition of a resume, and is never compared."""

from collections.abc import Mapping
from typing import Any, Final

from trainfold.core.audit import UNSAVED
from trainfold.core.trained import TRAINED

NOTES: Final = frozenset({UNSAVED, TRAINED})


def notes_of(contract: Mapping[str, Any]) -> dict[str, Any]:
    """The notes of a contract.

    Examples:
        >>> notes_of({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'unsaved': {'model.p': 'a number'}}
    """
    return {key: value for key, value in contract.items() if key in NOTES}


def without_notes(contract: Mapping[str, Any]) -> dict[str, Any]:
    """All but the notes.

    Examples:
        >>> without_notes({"unsaved": {"model.p": "a number"}, "batch_size": 8})
        {'batch_size': 8}
    """
    return {key: value for key, value in contract.items() if key not in NOTES}

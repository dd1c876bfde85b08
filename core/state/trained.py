"""Which parameters are trained: what a checkpoint says of those that a loop has frozen or unfrozen as it went (W07)."""

from collections.abc import Collection, Mapping
from typing import Final

TRAINED: Final = "requires_grad"  # the key of the contract; it is put back, and never compared


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

"""`slots_of_torch`: which slots an optimizer of torch makes for a parameter, and of what shape, without one being made."""

from collections.abc import Mapping
from typing import Any, Final

_NUMBER: Final = "number"
_LIKE: Final = "like the parameter"
_MOMENTS: Final = {"step": _NUMBER, "exp_avg": _LIKE, "exp_avg_sq": _LIKE}
_ADAM: Final = {**_MOMENTS, "max_exp_avg_sq": "amsgrad"}
_SLOTS: Final[Mapping[str, Mapping[str, str]]] = {
    "ASGD": {"step": _NUMBER, "eta": _NUMBER, "mu": _NUMBER, "ax": _LIKE},
    "Adadelta": {"step": _NUMBER, "square_avg": _LIKE, "acc_delta": _LIKE},
    "Adafactor": {"step": _NUMBER, "row_var": "rows", "col_var": "columns", "variance": "vectors"},
    "Adagrad": {"step": _NUMBER, "sum": _LIKE},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": {"step": _NUMBER, "exp_avg": _LIKE, "exp_inf": _LIKE},
    "Muon": {"momentum_buffer": _LIKE},
    "NAdam": {**_MOMENTS, "mu_product": _NUMBER},
    "RAdam": _MOMENTS,
    "RMSprop": {"step": _NUMBER, "square_avg": _LIKE, "momentum_buffer": "momentum", "grad_avg": "centered"},
    "Rprop": {"step": _NUMBER, "prev": _LIKE, "step_size": _LIKE},
    "SGD": {"momentum_buffer": "momentum"},
}
"""Class -> slot -> its shape, or the setting with which it is made and is like the parameter."""


def slots_of_torch(kind: str, hyper: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """The slots that an optimizer makes at the first step of a parameter; None for a class that is not known, such as one of another library.

    Args:
        kind: the class, such as ``torch.optim.adamw.AdamW``.
        hyper: of its group.
        shape: of the parameter.

    Examples:
        >>> slots_of_torch("torch.optim.adamw.AdamW", {"amsgrad": False}, (2, 3))
        {'step': (), 'exp_avg': (2, 3), 'exp_avg_sq': (2, 3)}
        >>> slots_of_torch("torch.optim._adafactor.Adafactor", {}, (4, 2, 3))
        {'step': (), 'row_var': (4, 2, 1), 'col_var': (4, 1, 3)}
    """
    table = _SLOTS.get(kind.rpartition(".")[2]) if kind.startswith("torch.optim.") else None
    if table is None:
        return None
    made = {slot: _shape(form, hyper, shape) for slot, form in table.items()}
    return {slot: each for slot, each in made.items() if each is not None}


def _shape(form: str, hyper: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if form in (_NUMBER, _LIKE):
        return () if form == _NUMBER else shape
    is_matrix = len(shape) > 1
    factored = {"rows": (*shape[:-1], 1), "columns": (*shape[:-2], 1, *shape[-1:])}
    if form in factored or form == "vectors":
        return factored.get(form, shape) if is_matrix == (form in factored) else None
    return shape if hyper.get(form) else None

"""The bounds of a position in the data. This module imports no torch: commands that plan a resume need it."""

from typing import Final

from trainfold.core.checks import count
from trainfold.core.errors import InvalidState

MAX_LENGTH: Final = 2**63 - 1  # an index is an int64


def check_bounds(length: int, *, seed: int, epoch: int, next_index: int) -> None:
    """Check the fields of a `DataCursor`.

    Args:
        length: samples in the dataset, >= 1.
        seed: the seed of the order, in [0, 2**64).
        epoch: finished epochs, >= 0.
        next_index: samples already read in this epoch, in [0, length).

    Raises:
        InvalidState: naming the invalid field.
    """
    for name, value, low, high in (
        ("length", length, 1, MAX_LENGTH + 1),
        ("seed", seed, 0, 2**64),
        ("epoch", epoch, 0, 2**63),
        ("next_index", next_index, 0, length),
    ):
        is_end = name == "next_index" and value == length
        fix = "write the end of an epoch as epoch + 1, next_index 0" if is_end else f"correct the {name}"
        count(f"state.dataset.{name}", value, least=low, below=high, fix=fix, error=InvalidState)

"""`quantised`: the converter of quantised weights with scales, which an export multiplies."""

from collections.abc import Iterable
from typing import final

import attrs

from trainfold.core.transform.name_template import NameTemplate
from trainfold.core.transform.values import Dequantise, dequantise


@final
@attrs.frozen
class Quantised:
    """See `quantised`."""

    state_dict_transform: Dequantise

    def __str__(self) -> str:
        return str(self.state_dict_transform)

    def key_filter(self, name: str) -> bool:
        """See `Converter`."""
        return self.state_dict_transform.scale.match(name) is not None

    def state_dict_adapter(self, name: str) -> str:
        """See `Converter`."""
        return name


def quantised(
    weight: str | NameTemplate,
    scale: str | NameTemplate,
    *,
    block: Iterable[int | None] = (128, 128),
    dtype: str = "bfloat16",
) -> Quantised:
    """The converter of weights in float8 or int8 with scales: an export has their product. In checkpoints both keep their dtypes.

    Args:
        weight: the names of the weights, such as ``{layer*}.weight``.
        scale: the names of their scales, with the same captures.
        block: see `dequantise`: ``(None, None)`` for a scale a tensor, ``(1, None)`` for one a row.
        dtype: of the export.

    Raises:
        InvalidArgument: as `dequantise` does.

    Examples:
        >>> quantised("{layer*}.weight", "{layer*}.weight_scale", block=(1, None)).key_filter("q.weight_scale")
        True
    """
    return Quantised(dequantise(weight, scale, block=block, dtype=dtype))

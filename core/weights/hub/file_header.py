"""`file_header`: the first bytes of a safetensors file, from names, dtypes and shapes alone. `HUB_DTYPES`: how such files name dtypes."""

import json
from collections.abc import Iterable, Mapping
from typing import Final

from trainfold.core.errors import InvalidState
from trainfold.core.format.dtypes import STORED, size_bytes
from trainfold.core.layout.leaf_spec import LeafSpec

LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
HUB_DTYPES: Final[Mapping[str, str]] = {
    **{name: each.name for name, each in STORED.items() if each.parts == 1 and name != "float4_e2m1fn_x2"},
    "float8_e8m0fnu": "F8_E8M0",
}
"""torch's name of a dtype -> that of a safetensors file."""


def file_header(tensors: Iterable[tuple[str, LeafSpec]], metadata: Mapping[str, str]) -> bytes:
    r"""The length and the text that come before the tensors of a file.

    Args:
        tensors: in the order of their bytes.
        metadata: texts about the file.

    Raises:
        InvalidState: for a dtype or a name that these files do not have, and a text that is not Unicode.

    Examples:
        >>> file_header([("w", LeafSpec("bfloat16", (2, 3)))], {})
        b'@\x00\x00\x00\x00\x00\x00\x00{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}      '
    """
    found: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, each in tensors:
        if name == _METADATA:
            raise InvalidState(name, expected="another name: files have their texts under this one", found=f"a tensor, {each}", fix="rename it: rules=compose(rules, rename(name, another))")  # fmt: skip
        if each.dtype not in HUB_DTYPES:
            raise InvalidState(name, expected=f"one of {', '.join(HUB_DTYPES)}", found=each.dtype,
                               fix="leave it out, or cast it: rules=compose(rules, drop(name))")  # fmt: skip
        stop = start + size_bytes(each.dtype, each.shape)
        found[name] = {"dtype": HUB_DTYPES[each.dtype], "shape": list(each.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(found, separators=(",", ":")).encode()
    if b"\\ud" in text:  # of a pair, as of a rare letter, or of half of one, which the readers of these files refuse
        odd = next((each for each in (*found, *metadata, *metadata.values()) if _is_half(each)), None)
        if odd is not None:
            raise InvalidState(ascii(odd), expected="a text of Unicode", found="half of a surrogate pair in it", fix="rename the tensor, or correct the text")  # fmt: skip
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the tensors are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _is_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False

"""`file_header`: the first bytes of a safetensors file, from names, dtypes and shapes alone. `HUB_DTYPES`: how such files name dtypes."""

import json
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring_ascii as _quoted
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
    begin = [f"{_quoted(_METADATA)}:{json.dumps(dict(metadata), separators=(',', ':'))}"] if metadata else []
    names, rows, start = list[str](), list[str](), 0
    kinds = dict[tuple[str, tuple[int, ...]], tuple[str, int]]()  # there are many tensors, and few kinds
    for name, each in tensors:
        if name == _METADATA:
            raise InvalidState(name, expected="another name: files have their texts under this one", found=f"a tensor, {each}", fix="rename it: rules=compose(rules, rename(name, another))")  # fmt: skip
        kind = kinds.get((each.dtype, each.shape))
        if kind is None:
            kinds[each.dtype, each.shape] = kind = _kind(name, each)
        stop = start + kind[1]
        names.append(name)
        rows.append(f"{_quoted(name)}:{kind[0]}{start},{stop}]}}")
        start = stop
    text = f"{{{','.join(begin + rows)}}}".encode()
    if b"\\ud" in text:  # of a pair, as of a rare letter, or of half of one, which the readers of these files refuse
        odd = next((each for each in (*names, *metadata, *metadata.values()) if _is_half(each)), None)
        if odd is not None:
            raise InvalidState(ascii(odd), expected="a text of Unicode", found="half of a surrogate pair in it", fix="rename the tensor, or correct the text")  # fmt: skip
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the tensors are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _kind(name: str, each: LeafSpec) -> tuple[str, int]:
    """What a header says of tensors of a dtype and a shape, up to the place of their bytes, and their size."""
    if each.dtype not in HUB_DTYPES:
        raise InvalidState(name, expected=f"one of {', '.join(HUB_DTYPES)}", found=each.dtype,
                           fix="leave it out, or cast it: rules=compose(rules, drop(name))")  # fmt: skip
    sizes = ",".join(map(str, each.shape))
    return f'{{"dtype":"{HUB_DTYPES[each.dtype]}","shape":[{sizes}],"data_offsets":[', size_bytes(
        each.dtype, each.shape
    )


def _is_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False

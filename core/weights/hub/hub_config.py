"""What the configuration of a hub model says about its weights: whether its head is tied to its embeddings, and their dtype."""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from trainfold.core.checks import choice
from trainfold.core.errors import CheckpointDamaged, InvalidArgument

HUB_CONFIG: Final = "config.json"
_QUANTISED: Final = ("float8", "int8", "uint8", "int32")  # some keep numbers of 4 bits in whole words
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")  # as transformers 5 and 4 write it


def is_tied(config: Mapping[str, object] | None, *, by_default: bool | None) -> bool | None:
    """Whether the head is tied to the embeddings; None if it is not known.

    Args:
        config: what is in ``config.json``; None if there is none.
        by_default: for models of this family whose configuration does not mention it.

    Raises:
        InvalidArgument: if it is neither true nor false.

    Examples:
        >>> is_tied({"tie_word_embeddings": True}, by_default=False), is_tied(None, by_default=None)
        (True, None)
    """
    found = (config or {}).get("tie_word_embeddings", by_default)
    if found is None:
        return None
    return bool(choice("config.tie_word_embeddings", found, (True, False), fix="pass the config.json of the model"))


def config_of(text: bytes, where: str) -> dict[str, Any]:
    """Read ``config.json``. Unlike the native format it may have infinite numbers, and letters of all languages.

    Args:
        text: its bytes.
        where: its path, for the error.

    Raises:
        CheckpointDamaged: if it is not one object of JSON.

    Examples:
        >>> config_of(b'{"model_type": "llama"}', "config.json")
        {'model_type': 'llama'}
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise CheckpointDamaged(where, expected="one object of JSON", found=str(found)[:120], fix="download it again")
    return found


def config_text(config: Mapping[str, Any], dtype: str | None, *, dtypes: Collection[str] = ()) -> bytes:
    r"""The bytes of ``config.json``. It says of the dtype what the weights have, because its readers round to it, and nothing of a quantisation that they do not have any more.

    Args:
        config: what is in it.
        dtype: to which they were cast; None if they were not.
        dtypes: that the weights have.

    Examples:
        >>> config_text({"torch_dtype": "float32"}, "bfloat16")
        b'{\n  "torch_dtype": "bfloat16"\n}\n'
        >>> config_text({"torch_dtype": "bfloat16"}, None, dtypes=["float32", "int64"])
        b'{\n  "torch_dtype": "float32"\n}\n'
    """
    is_quantised = any(each.startswith(_QUANTISED) for each in dtypes)
    floating = {each for each in dtypes if each.startswith(("float", "bfloat"))}
    only = floating.pop() if dtype is None and not is_quantised and len(floating) == 1 else dtype
    changed = {key: only for key in _DTYPE_KEYS if only is not None and config.get(key) is not None}
    kept = {key: each for key, each in config.items() if is_quantised or key != "quantization_config"}
    return (json.dumps({**kept, **changed}, indent=2, default=_listed) + "\n").encode()


def _listed(each: object) -> list[Any]:
    """A set as the list that a configuration has in its file."""
    if isinstance(each, set | frozenset):
        return sorted(each)
    raise InvalidArgument(
        "config", expected="values of JSON", found=type(each).__qualname__, fix="pass what is to be in the file"
    )

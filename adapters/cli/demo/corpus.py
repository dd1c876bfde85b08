"""The demo's training text: the help topics of CPython, which every machine has, cut into windows of bytes."""

import pydoc_data.topics
from typing import final

import attrs
import torch

from trainfold.core.errors import InvalidArgument


@final
@attrs.frozen
class Corpus:
    """Windows of a text, ``context + 1`` bytes each, so that every byte of the text but the first is a target.

    Attributes:
        train: uint8[n, context + 1]; each window begins with the last byte of the one before.
        heldout: uint8[m, context + 1], from the tail of the text, which no training window contains.
    """

    train: torch.Tensor
    heldout: torch.Tensor


def help_text() -> bytes:
    """The help topics of this Python (about 465 kB of English prose), in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def text_windows(text: bytes, context: int) -> torch.Tensor:
    """Cut a text into windows that overlap by one byte; a remainder that does not fill a window is left out.

    Args:
        text: the bytes.
        context: predictions per window, >= 1.

    Returns:
        uint8[n, context + 1].

    Raises:
        InvalidArgument: if the text does not fill a window.

    Examples:
        >>> [bytes(window.tolist()) for window in text_windows(b"abcdefgh", 3)]
        [b'abcd', b'defg']
    """
    if len(text) <= context:
        raise InvalidArgument(
            "windows.text", expected=f"more than {context} bytes", found=len(text), fix="pass a longer text"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


def make_corpus(text: bytes, *, context: int, heldout_bytes: int) -> Corpus:
    """Split a text into windows to train on and windows to measure with.

    Law: the two parts share no byte.

    Args:
        text: the bytes.
        context: predictions per window.
        heldout_bytes: length of the tail, which is used for the evaluation only.

    Returns:
        The two sets of windows.

    Raises:
        InvalidArgument: if a part does not fill a window.

    Examples:
        >>> corpus = make_corpus(bytes(range(100)), context=4, heldout_bytes=20)
        >>> int(corpus.train.max()) < 80 <= int(corpus.heldout.min())
        True
    """
    cut = max(0, len(text) - heldout_bytes)
    return Corpus(train=text_windows(text[:cut], context), heldout=text_windows(text[cut:], context))


def as_batch(chosen: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs and targets of a step, from windows: ``{"x": int64[b, t], "y": int64[b, t]}``."""
    return {"x": chosen[:, :-1].long(), "y": chosen[:, 1:].long()}

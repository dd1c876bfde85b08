"""The text that every machine has: the help topics of CPython, as windows of bytes."""

import pydoc_data.topics
from typing import final

import attrs
import torch

from trainfold.core.errors import InvalidArgument


@final
@attrs.frozen
class Corpus:
    """Windows of a text, ``context + 1`` bytes each, so that every byte but the first is a target.

    Attributes:
        train: uint8[n, context + 1], each beginning with the last byte of the one before.
        heldout: uint8[m, context + 1], from the tail of the text, which no training window touches.
    """

    train: torch.Tensor
    heldout: torch.Tensor


def help_text() -> bytes:
    """The help topics of the Python that runs this (about 465 kB of English prose), in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def windows(text: bytes, context: int) -> torch.Tensor:
    """Cut a text into windows that overlap in one byte; a rest that fills no window is left out.

    Args:
        text: the bytes.
        context: predictions in a window, >= 1.

    Returns:
        uint8[n, context + 1].

    Raises:
        InvalidArgument: if the text does not fill one window.

    Examples:
        >>> [bytes(window.tolist()) for window in windows(b"abcdefgh", 3)]
        [b'abcd', b'defg']
    """
    if len(text) <= context:
        raise InvalidArgument(
            "windows.text", expected=f"more than {context} bytes", found=len(text), fix="give more text"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


def make_corpus(text: bytes, *, context: int, heldout_bytes: int) -> Corpus:
    """Split a text into windows to train on and windows to measure with.

    Law: no byte is in both parts.

    Args:
        text: the bytes.
        context: predictions in a window.
        heldout_bytes: length of the tail that is kept for the evaluation.

    Returns:
        The two sets of windows.

    Raises:
        InvalidArgument: if one of the parts does not fill a window.

    Examples:
        >>> corpus = make_corpus(bytes(range(100)), context=4, heldout_bytes=20)
        >>> int(corpus.train.max()) < 80 <= int(corpus.heldout.min())
        True
    """
    cut = max(0, len(text) - heldout_bytes)
    return Corpus(train=windows(text[:cut], context), heldout=windows(text[cut:], context))


def as_batch(chosen: torch.Tensor) -> dict[str, torch.Tensor]:
    """Turn windows into the inputs and targets of a step: ``{"x": int64[b, t], "y": int64[b, t]}``."""
    return {"x": chosen[:, :-1].long(), "y": chosen[:, 1:].long()}

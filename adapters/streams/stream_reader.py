"""`StreamReader`: finds which global random streams of this process have moved, cheaply enough to run at each batch.

It also runs in the workers of a loader, so it imports little.
"""

import ctypes
import random
import struct
import sys
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch

Streams: TypeAlias = dict[str, Any]

_WORDS: Final = struct.Struct("625I")  # python's Mersenne twister: 624 words and a position
_FIRST: Final = 32  # this many bytes of the words show whether all of them were regenerated
_NUMPY_POSITION: Final = 624 * 4  # in memory: the words, then the position
_RANDOM: Final = random.random.__self__  # type: ignore[attr-defined] # the stream that the functions of `random` draw from


def _place_of_python() -> int | None:
    """Where python's stream keeps its position and then its words, or None if they are not found.

    They are searched for, because no interpreter promises where they are.
    """
    if sys.implementation.name != "cpython":
        return None
    _, words, _ = _RANDOM.getstate()
    written = ctypes.string_at(id(_RANDOM), type(_RANDOM).__basicsize__)
    found = written.find(_WORDS.pack(words[-1], *words[:-1]))
    return None if found < 0 else id(_RANDOM) + found


@final
class StreamReader:
    """Reads the streams ``python``, ``numpy`` and ``torch`` repeatedly; none of them moves.

    A read costs a few microseconds if nothing moved. Only a stream that has moved becomes a value: to return the state of
    its stream, python makes 625 numbers and numpy takes 30 microseconds. So for these two the position and the first words
    are read from memory. Every draw moves the position or regenerates all the words.

    Examples:
        >>> reader = StreamReader()
        >>> reader.moved()
        {}
        >>> _ = torch.rand(1)
        >>> list(reader.moved())
        ['torch']
    """

    def __init__(self) -> None:
        self._place = _place_of_python()
        self._python: Any = None
        self._numpy: Any = None
        self._torch = b""
        self._gauss: Any = None  # numpy's second number of a pair, if there is one
        self.streams: Streams = {}
        self.moved()

    def moved(self) -> Streams:
        """The streams that have moved since the last call, with their current values."""
        found: Streams = {}
        python = self._marks_of_python()
        if python != self._python:
            self._python = python
            version, words, gauss = _RANDOM.getstate()
            packed = np.frombuffer(_WORDS.pack(*words), dtype=np.uint32)
            found["python"] = {"version": version, "words": packed, "gauss": gauss}
        value = self._moved_numpy()
        if value is not None:
            found["numpy"] = value
        now = torch.default_generator.get_state()
        state = ctypes.string_at(now.data_ptr(), now.numel())
        if state != self._torch:
            self._torch = state
            found["torch"] = np.frombuffer(state, dtype=np.uint8)
        if found:
            self.streams = {**self.streams, **found}
        return found

    def _marks_of_python(self) -> Any:
        """Bytes that every draw from python's stream changes."""
        if self._place is not None:
            return ctypes.string_at(self._place, 4 + _FIRST), _RANDOM.gauss_next
        _, words, gauss = _RANDOM.getstate()
        return words[-1], words[:8], gauss

    def _moved_numpy(self) -> Any:
        """Numpy's stream, if it has moved.

        The second number of a pair of normal ones is elsewhere in memory. It can only be used up if there is one.
        """
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is np.random.MT19937:
            place: Any = bits.ctypes.state_address
            marks = place, ctypes.string_at(place, _FIRST), ctypes.string_at(place + _NUMPY_POSITION, 4)
            if marks == self._numpy and self._gauss is None:
                return None
            value: Any = np.random.get_state(legacy=False)  # noqa: NPY002 (user code draws from this stream)
            gauss = value["gauss"] if value["has_gauss"] else None
            if marks == self._numpy and gauss == self._gauss:
                return None
            self._numpy, self._gauss = marks, gauss
            return value
        value = np.random.get_state(legacy=False)  # noqa: NPY002 (user code draws from this stream)
        shown = repr(value)
        if shown == self._numpy:
            return None
        self._numpy = shown
        return value


def set_streams(streams: Streams) -> None:
    """Write the streams present, as `StreamReader` or ``capture_streams`` read them.

    Examples:
        >>> reader = StreamReader()
        >>> first = torch.rand(1)
        >>> set_streams({"torch": reader.streams["torch"]})
        >>> torch.equal(first, torch.rand(1))
        True
    """
    if "python" in streams:
        value = streams["python"]
        random.setstate((value["version"], tuple(value["words"].tolist()), value["gauss"]))
    if "numpy" in streams:
        np.random.set_state(streams["numpy"])  # noqa: NPY002 (user code draws from this stream)
    if "torch" in streams:
        state = streams["torch"]
        torch.set_rng_state(state.cpu() if isinstance(state, torch.Tensor) else torch.from_numpy(state.copy()))

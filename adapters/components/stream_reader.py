"""`StreamReader`: which global random streams of this process have moved, at a cost that each batch can bear.

It runs in the workers of a loader too, so it imports little.
"""

import ctypes
import random
import struct
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch

Streams: TypeAlias = dict[str, Any]

_WORDS: Final = struct.Struct("625I")  # python's Mersenne twister: 624 words and a position
_MT19937_BYTES: Final = 624 * 4 + 4  # numpy's, in memory: the same


@final
class StreamReader:
    """Reads the streams ``python``, ``numpy`` and ``torch``, again and again; none of them moves.

    Reading costs about 10 microseconds where nothing moved. Only a stream that has moved is made a value.

    Examples:
        >>> reader = StreamReader()
        >>> reader.moved()
        {}
        >>> _ = torch.rand(1)
        >>> list(reader.moved())
        ['torch']
    """

    def __init__(self) -> None:
        self._python: Any = None
        self._numpy: Any = None
        self._torch = b""
        self._has_gauss = True
        self.streams: Streams = {}
        self.moved()

    def moved(self) -> Streams:
        """The streams that have moved since the last call, as they are now."""
        found: Streams = {}
        version, words, gauss = random.getstate()
        # Every draw moves the position, which is the last word, or makes all the words anew.
        python = (words[-1], words[:8], gauss)
        if python != self._python:
            self._python = python
            packed = np.frombuffer(_WORDS.pack(*words), dtype=np.uint32)
            found["python"] = {"version": version, "words": packed, "gauss": gauss}
        value = self._moved_numpy()
        if value is not None:
            found["numpy"] = value
        state = torch.get_rng_state().numpy().tobytes()
        if state != self._torch:
            self._torch = state
            found["torch"] = np.frombuffer(state, dtype=np.uint8)
        if found:
            self.streams = {**self.streams, **found}
        return found

    def _moved_numpy(self) -> Any:
        """Numpy needs 30 microseconds to say its state, so its memory is looked at first.

        The second number of a pair of normal ones lies outside that memory. It can only be used up where there is one.
        """
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is np.random.MT19937:
            memory: Any = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
            if memory == self._numpy and not self._has_gauss:
                return None
            value: Any = np.random.get_state(legacy=False)  # noqa: NPY002 (user code draws from this stream)
            gauss = bool(value["has_gauss"])
            if memory == self._numpy and gauss == self._has_gauss:
                return None
            self._numpy, self._has_gauss = memory, gauss
            return value
        value = np.random.get_state(legacy=False)  # noqa: NPY002 (user code draws from this stream)
        shown = repr(value)
        if shown == self._numpy:
            return None
        self._numpy = shown
        return value


def set_streams(streams: Streams) -> None:
    """Write those streams that are given, as `StreamReader` or ``capture_streams`` read them.

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

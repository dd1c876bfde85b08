"""`StreamDigest`: where the global random streams of this process are, in 12 bytes, cheaply enough for each step."""

from typing import Final, final

import torch
import xxhash

from trainfold.adapters.streams.stream_reader import StreamReader

_HOST: Final = ("python", "numpy")


@final
class StreamDigest:
    """Digests the streams ``python``, ``numpy``, ``torch`` and that of the current CUDA device, if there is one. None of them moves.

    Examples:
        >>> streams = StreamDigest()
        >>> before = streams()
        >>> before == streams(), torch.rand(1) is not None and before == streams()
        (True, False)
    """

    def __init__(self) -> None:
        self._reader = StreamReader()
        self._digests = {name: _digest(name, value) for name, value in self._reader.streams.items()}

    def __call__(self) -> tuple[bytes, bytes]:
        """The digests now: of torch's streams, 8 bytes; and of those of python and numpy, 4 bytes."""
        for name, value in self._reader.moved().items():
            self._digests[name] = _digest(name, value)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._digests["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
        own = {name: self._digests[name] for name in sorted(self._digests)}
        host = b"".join(own.pop(name, b"") for name in _HOST)
        return xxhash.xxh3_64_digest(b"".join(own.values())), xxhash.xxh3_64_digest(host)[:4]


def _digest(name: str, value: object) -> bytes:
    found = xxhash.xxh3_64(name.encode())
    _add(found, value)
    return bytes(found.digest())


def _add(found: "xxhash.xxh3_64", value: object) -> None:
    if isinstance(value, dict):
        for each in value.values():
            _add(found, each)
    elif hasattr(value, "tobytes"):
        found.update(value.tobytes())
    else:
        found.update(repr(value).encode())

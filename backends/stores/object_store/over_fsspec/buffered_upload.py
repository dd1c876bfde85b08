"""`BufferedUpload`: an object in parts through a file of fsspec that can be given up."""

from contextlib import suppress
from typing import Any, final


@final
class BufferedUpload:
    """See `Upload`.

    Args:
        file: opened for writing with ``autocommit=False``.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, part: bytearray) -> None:
        """See `Upload.write`."""
        self._file.write(part)

    def commit(self) -> None:
        """See `Upload.commit`."""
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        """See `Upload.abort`."""
        self._file.closed = True  # or it is put together when it is collected as garbage
        with suppress(Exception):
            self._file.discard()

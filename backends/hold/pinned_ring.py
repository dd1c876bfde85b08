"""`PinnedRing`: reads the tensors of a CUDA device through a few pinned buffers, on its own stream, ordered by events."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, final

import torch

SLOTS: Final = 4
_CUDA: Any = torch.cuda  # half of it is untyped
Begun: TypeAlias = tuple[torch.Tensor, Any]


@final
class PinnedRing:
    """Copies pieces to the host in parallel with the computation, a few ahead of the one being written.

    Reads come after what was in the current stream when the ring was made. Writes after `order_writes` wait for the reads that have
    begun, on the device and not on the host.

    Args:
        device: a CUDA device.
        piece_bytes: the largest piece; ``SLOTS`` of them are pinned.
    """

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        self._stream: Any = _CUDA.Stream(device)
        self._stream.wait_stream(_CUDA.current_stream(device))
        self.piece_bytes = piece_bytes
        self._slots: list[torch.Tensor] = []
        self._number = 0
        self._latest: Any = None

    def wait_for_current(self) -> None:
        """Make later reads wait for the work now in the current stream, such as a copy made in it."""
        self._stream.wait_stream(_CUDA.current_stream(self._device))

    def order_writes(self) -> None:
        """Make later work in the current stream wait for the reads that have started."""
        if self._latest is not None:
            _CUDA.current_stream(self._device).wait_event(self._latest)

    def pieces(self, begin_next: Callable[[], Begun | None]) -> Iterator[torch.Tensor]:
        """The pieces whose reads a function starts, on the host, in order.

        Args:
            begin_next: calls `begin` with the next bytes, or returns None if there are no more.

        Yields:
            Each piece; it is valid until the next one is asked for.
        """
        begun: deque[Begun] = deque()
        is_done = False
        while begun or not is_done:
            while not is_done and len(begun) < SLOTS - 1:  # one slot is being written
                found = begin_next()
                is_done = found is None
                begun.extend([] if found is None else [found])
            if begun:
                host, event = begun.popleft()
                event.synchronize()
                yield host

    def begin(self, piece: torch.Tensor) -> Begun:
        """Start to read some bytes; they may be written to after a call of `order_writes`.

        Returns:
            Where they will be, and the event after which they are.
        """
        if not self._slots:
            self._slots = [torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)]
        host = self._slots[self._number % SLOTS][: piece.numel()]
        self._number += 1
        with _CUDA.stream(self._stream):
            host.copy_(piece, non_blocking=True)
            event = _CUDA.Event()
            event.record(self._stream)
        self._latest = event
        return host, event

"""`LoopsOverData`: the loops of a run over its batches and epochs."""

from collections.abc import Iterator
from typing import Any

from trainfold.adapters.live.loop.loop_data import LoopData
from trainfold.core.errors import InvalidArgument


class LoopsOverData:
    """What `Live` does with the data of a loop."""

    _data: LoopData | None

    def batches(
        self, loader: str | None = None, /, *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Any]:
        """Yield the loader's batches from the position on, also from the middle of an epoch, and epoch after epoch.

        ``set_epoch`` is called on samplers that have it, before the sampler is started. If ``epochs`` or ``steps`` are reached already, no
        batch is drawn and no iterator is made; for ``epochs`` a warning is logged. In the body of a loop over `epochs` it yields the batches of
        that epoch. If random streams have moved since a restore, they are put back at the first batch, and a warning names them. Once a manager
        has restored the run on several ranks, their epochs end together: see ``uneven`` of `attach`.

        Args:
            loader: its name, if several are attached.
            epochs: stop when the run has had so many, from its beginning; None for no limit.
            steps: stop when the run has had so many optimizer steps, from its beginning; None for no limit.

        Yields:
            What the loader yields.

        Raises:
            InvalidArgument: if no loader was attached.
            DataPositionMismatch: if the loader turns out not to be able to take the position.
            RanksDisagree: on every rank, if one has batches that another one has not.
        """
        return self._loop_data("live.batches").batches(
            loader, epochs=epochs, until=steps, done=lambda: self._is_over(steps)
        )

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs still to do, for a nested loop over epochs and batches.

        Inside, ``live.batches()`` yields the rest of that epoch. Leaving it early begins the next epoch, as it does in a plain loop, and so does
        a resume from a save after that. A resume from a save at an epoch's last batch comes back to that epoch: no batch is left, and the body
        does what follows them.

        A resume inside an epoch runs the start of its body again. What this changes of the run is put back at the first batch, and a warning names
        it. What moved between the restore and this loop is put back before the loop begins.

        Args:
            n: how many epochs the run has, from its beginning.

        Yields:
            The number of each, from the one that the run is in.

        Raises:
            InvalidArgument: if no loader was attached.
            RestoreRefused: at the first batch, if what the start of a body has changed cannot be put back.

        Examples:
            >>> import torch
            >>> from trainfold import attach
            >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
            >>> live = attach(torch.nn.Linear(1, 1), loader=loader)
            >>> for epoch in live.epochs(2):
            ...     for batch in live.batches():
            ...         progress = live.advance(samples=len(batch))
            >>> epoch, progress.step
            (1, 4)
        """
        return self._loop_data("live.epochs").epochs(n, done=self._is_over)

    def _is_over(self, steps: int | None = None) -> bool:
        """Whether the run has had so many steps, or all that a rehearsal wants."""
        raise NotImplementedError

    def _loop_data(self, where: str) -> LoopData:
        if self._data is None:
            raise InvalidArgument(where, expected="an attached loader", found="none", fix="attach(..., loader=loader)")
        return self._data

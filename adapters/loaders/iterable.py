"""`Replay`: draws the batches of an iterable dataset without a state, so that a resume can draw the same ones again."""

from collections.abc import Iterator
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from trainfold.adapters.batches.batch_digest import content
from trainfold.adapters.batches.feed import END, mismatch
from trainfold.adapters.streams.rng_streams import capture_streams, preserved_rng, restore_streams
from trainfold.backends.derived_streams import derive_streams
from trainfold.core.digest import digest_of
from trainfold.core.printable import with_article
from trainfold.core.state.state import Opaque


@final
class Replay:
    """One epoch of an iterable dataset, whose batches depend only on what the epoch was started from.

    Without workers, the dataset gets its own random streams, as it does in a worker. If it drew from the training's
    streams, as a shuffle buffer does, nothing short of training again could reproduce its draws.

    Args:
        loader: torchdata's loader over the dataset.
        order: everything that the epoch was started from.
        digest: of the batches that were drawn already.
    """

    def __init__(self, loader: "DataLoader[Any]", order: Opaque, *, digest: str = "") -> None:
        self.digest = digest
        self._kind = type(loader.dataset).__qualname__
        seed = int(digest_of(content(order.value["streams"]).encode())[-15:], 16)
        self._streams = derive_streams(seed, step=0) if loader.num_workers == 0 else None

    def draw(self, iterator: Iterator[Any]) -> Any:
        """The next batch, or `END`."""
        if self._streams is None:
            batch = next(iterator, END)
        else:
            with preserved_rng():
                restore_streams(self._streams)
                batch = next(iterator, END)
                self._streams = capture_streams()
        if batch is not END:
            self.digest = digest_of((self.digest + content(batch)).encode())
        return batch

    def skip(self, iterator: Iterator[Any], batches: int, digest: str) -> None:
        """Draw batches again, and compare them with those of the first time.

        Args:
            iterator: of the loader.
            batches: how many.
            digest: of these batches, when they were first drawn.

        Raises:
            DataPositionMismatch: if there are fewer batches, or their digest differs.
        """
        drawn = 0
        while drawn < batches and self.draw(iterator) is not END:
            drawn += 1
        if drawn < batches or self.digest != digest:
            raise mismatch(
                "state.dataset.digest",
                f"the {batches} batches that the epoch had, from {with_article(self._kind)} whose position is not known",
                "others" if drawn == batches else f"{drawn} batches",
                "give it the data that the run was started with; if it yields other samples each time that it is "
                "iterated, give it state_dict and load_state_dict",
            )


def torchdatas(loader: object) -> bool:
    """Whether it is torchdata's loader. A user's loader decides itself what it saves."""
    return any(base.__module__.split(".")[0] == "torchdata" for base in type(loader).__mro__)


def iterates(loader: Any) -> bool:
    """Whether it is torchdata's loader over an iterable dataset."""
    return torchdatas(loader) and isinstance(loader.dataset, IterableDataset)


def keeps_nothing(state: Any) -> bool:
    """Whether the state of such a loader contains nothing of its dataset.

    Examples:
        >>> keeps_nothing({"dataset_state": None}), keeps_nothing({"dataset_state": {"at": 5}})
        (True, False)
    """
    return all(value is None for value in _values(state, "dataset_state", "dataset_iter_state"))


def ended_in_part(state: Any) -> bool:
    """Whether the dataset has come to its end in a worker; torchdata 0.11 would restart it there.

    Examples:
        >>> ended_in_part({"worker_0": {"fetcher_ended": True}, "worker_1": {"fetcher_ended": False}})
        True
    """
    return any(_values(state, "fetcher_ended"))


def _values(state: Any, *names: str) -> Iterator[Any]:
    """The values under these names, at any depth."""
    if isinstance(state, dict):
        for name, value in state.items():
            if name in names:
                yield value
            else:
                yield from _values(value, *names)

"""`RecentChanges`: what was put and deleted last. A list of the bucket that lags is corrected by it, so that it hides no commit."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

import attrs

from trainfold.backends.stores.object_store.bucket import Found

_MOST: Final = 4096


@final
@attrs.frozen
class BucketList:
    """What is below a directory.

    Attributes:
        objects: by their keys.
        is_late: whether the list of the store was of an earlier time. Then it may lack other objects too.
    """

    objects: Mapping[str, Found]
    is_late: bool


@final
class RecentChanges:
    """The newest changes of a bucket that this process knows of: its own, and those that the lease names.

    Examples:
        >>> changes = RecentChanges()
        >>> now = Found(3, 0.0, "tag")
        >>> changes.put("a", now)
        >>> changes.corrected({}, "", lambda key: now) == BucketList({"a": now}, is_late=True)
        True
        >>> changes.corrected({"a": now}, "", lambda key: None) == BucketList({"a": now}, is_late=False)
        True
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._changed: dict[str, Found | None] = {}

    def put(self, key: str, found: Found | None) -> None:
        """Note an object that was put, or that is gone."""
        with self._mutex:
            self._changed.pop(key, None)
            self._changed[key] = found
            if len(self._changed) > _MOST:
                del self._changed[next(iter(self._changed))]

    def deleted(self, *keys: str) -> None:
        """Note objects that were deleted."""
        for key in keys:
            self.put(key, None)

    def learn(self, committed: Iterable[tuple[str, str]]) -> None:
        """Note what other processes have committed, as (key, tag); the tag is "" if it is not known."""
        for key, tag in committed:
            known = self.below("").get(key)
            if known is None or known.tag != tag:
                self.put(key, Found(0, 0.0, tag))

    def below(self, directory: str) -> dict[str, Found | None]:
        """The noted objects in a directory, at any depth; None for a deleted one."""
        start = f"{directory}/" if directory else ""
        with self._mutex:
            return {key: found for key, found in self._changed.items() if key.startswith(start)}

    def corrected(self, listed: Mapping[str, Found], directory: str, head: Callable[[str], Found | None]) -> BucketList:
        """What is in a directory: a list of it, corrected where it contradicts the changes.

        There the store is asked for the object itself: the list may be old, or another program may have changed it since.

        Args:
            listed: all objects below the directory, as the store lists them.
            directory: "" for the run.
            head: asks the store for one object; it does not lag.
        """
        now, is_late = dict(listed), False
        for key, noted in self.below(directory).items():
            shown = listed.get(key)
            if _same(shown, noted):
                continue
            there = head(key)
            now.pop(key, None)
            if there is not None:
                now[key] = there
            is_late = is_late or not _same(shown, there)
            with self._mutex:
                if key in self._changed and self._changed[key] == noted:
                    self._changed[key] = there
        return BucketList(now, is_late)


def _same(one: Found | None, other: Found | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.tag != "" and one.tag == other.tag

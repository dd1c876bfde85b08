"""`RecentChanges`: what this process has put and deleted, until a list of the bucket shows it. So a list that lags does not hide one's own commits."""

import threading
from collections.abc import Callable, Mapping
from typing import final

from trainfold.backends.stores.object_store.bucket import Found


@final
class RecentChanges:
    """The objects that this process has changed, and that no list has shown as they are now.

    Examples:
        >>> changes = RecentChanges()
        >>> now = Found(3, 0.0, "tag")
        >>> changes.put("a", now)
        >>> changes.settled({}, "", lambda key: now) == {"a": now}
        True
        >>> changes.settled({"a": now}, "", lambda key: None) == {"a": now}, changes.below("")
        (True, {})
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._changed: dict[str, Found | None] = {}

    def put(self, key: str, found: Found) -> None:
        """Note an object that was put."""
        with self._mutex:
            self._changed[key] = found

    def deleted(self, *keys: str) -> None:
        """Note objects that were deleted."""
        with self._mutex:
            self._changed.update(dict.fromkeys(keys))

    def below(self, directory: str) -> dict[str, Found | None]:
        """The noted objects in a directory, at any depth; None for a deleted one."""
        start = f"{directory}/" if directory else ""
        with self._mutex:
            return {key: found for key, found in self._changed.items() if key.startswith(start)}

    def settled(
        self, listed: Mapping[str, Found], directory: str, head: Callable[[str], Found | None]
    ) -> dict[str, Found]:
        """What is in a directory: a list of it, corrected where it contradicts what this process has done.

        Where it does, the store is asked for the object itself: another program may have changed it since. What the list shows is noted no longer.

        Args:
            listed: all objects below the directory, as the store lists them.
            directory: "" for the run.
            head: asks the store for one object; it does not lag.
        """
        now = dict(listed)
        for key, mine in self.below(directory).items():
            shown = listed.get(key)
            there = mine
            if not _same(shown, mine):
                there = head(key)
                if there is None:
                    now.pop(key, None)
                else:
                    now[key] = there
            with self._mutex:
                if key in self._changed and _same(self._changed[key], mine):
                    if _same(shown, there):
                        del self._changed[key]
                    else:
                        self._changed[key] = there
        return now


def _same(one: Found | None, other: Found | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.tag != "" and one.tag == other.tag

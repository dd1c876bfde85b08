"""`UnusedManager`: reports at the end that a run was trained but its manager was never called to save."""

import logging
import sys
import weakref
from typing import Final, final

from trainfold.adapters.live.live import Live

_LOG: Final = logging.getLogger("trainfold")


@final
class UnusedManager:
    """Watches a live run from its restore until the first call that may save it.

    Args:
        url: of the run.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._run: weakref.ref[Live] | None = None
        self._step = 0
        self._is_asked = False

    def watch(self, run: Live) -> None:
        """Note a run that begins or continues."""
        self._run, self._step = weakref.ref(run), run.progress.step

    def asked(self) -> None:
        """Note a call that may save."""
        self._is_asked = True

    def closing(self) -> None:
        """Log an error if steps were trained; one step that ended in an exception does not count, because its save was still to come."""
        run = None if self._run is None or self._is_asked else self._run()
        trained = 0 if run is None else run.progress.step - self._step
        self._run = None
        if trained > (0 if sys.exc_info()[1] is None else 1):
            _LOG.error(
                "%s: %d steps were trained since the restore, and none of them was saved, because the manager was never called. Call "
                "manager.step(live) after each live.advance(), and manager.finish(live) at the end",
                self._url,
                trained,
            )

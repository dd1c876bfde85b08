"""`LivePage`: the newest page of a run that goes on, read only while a client looks, and what of it has changed."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Final, final

from trainfold.adapters.cli.page.gather import PageReader
from trainfold.core.errors import TrainfoldError
from trainfold.core.page.document import page_html, sections_html

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'"  # fmt: skip
SCRIPT: Final = """'use strict';
const now = document.getElementById('now');
const source = new EventSource('events');
source.onmessage = (event) => {
  const news = JSON.parse(event.data);
  for (const [id, html] of Object.entries(news.sections)) {
    const old = document.getElementById(id);
    if (old === null) continue;
    const open = [...old.querySelectorAll('details')].map((each) => each.open);
    const left = [...old.querySelectorAll('.scroll')].map((each) => each.scrollLeft);
    old.outerHTML = html;
    const fresh = document.getElementById(id);
    fresh.querySelectorAll('details').forEach((each, at) => { each.open = open[at] === true; });
    fresh.querySelectorAll('.scroll').forEach((each, at) => { each.scrollLeft = left[at] || 0; });
  }
  now.textContent = news.text;
};
source.onerror = () => { now.textContent = 'The server does not answer. It is asked again.'; };
"""


@final
class LivePage:
    """Reads a run at most once each ``every_secs``, however many clients look, and not at all without one.

    Args:
        reader: reads the run.
        every_secs: the shortest time between two looks.
    """

    def __init__(self, reader: PageReader, *, every_secs: float = 1.0) -> None:
        self._reader = reader
        self._every_secs = every_secs
        self._lock = threading.Lock()
        self._sections: dict[str, str] = {}
        self._version = 0
        self._looked_at = 0.0
        self.ends = threading.Event()

    def whole(self) -> str:
        """The whole page, as it is now.

        Raises:
            CheckpointError: the matching subclass, if it is not a run any more.
        """
        with self._lock:
            return page_html(self._reader.read(), policy=POLICY, script="live.js")

    def changes(self) -> Iterator[str]:
        """What a client needs from its start on: a message, or an empty text where there is nothing new, each ``every_secs``; it ends with the server."""
        known: dict[str, str] = {}
        seen = -1
        while not self.ends.is_set():
            version, sections, problem = self._look()
            if problem:
                yield _message({}, problem)
            elif version != seen:
                new = {key: html for key, html in sections.items() if known.get(key) != html}
                known, seen = sections, version
                yield _message(new, f"Following the run; it was last read at {time.strftime('%H:%M:%S')}.")
            else:
                yield ""
            self.ends.wait(self._every_secs)

    def _look(self) -> tuple[int, dict[str, str], str]:
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= self._every_secs or not self._version:
                self._looked_at = now
                try:
                    if self._reader.has_changed() or not self._version:
                        self._sections = sections_html(self._reader.read())
                        self._version += 1
                    self._looked_at = time.monotonic()
                except (TrainfoldError, OSError) as error:
                    return self._version, self._sections, f"The run cannot be read: {error}"
            return self._version, self._sections, ""


def _message(sections: dict[str, str], text: str) -> str:
    return json.dumps({"sections": sections, "text": text})

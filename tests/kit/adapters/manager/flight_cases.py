"""Helpers shared by the tests of flight logs and journals: a run that records, and what a death leaves of its manager."""

import logging
import random

from kit.adapters.manager.manager_cases import Job
from trainfold.backends.user_warning import WARNED


class Recorded(Job):
    """A job that records its loss, and dies without a word at a step."""

    def run(self, manager, steps, dies_after=None):
        manager.restore(self.live)
        for x, y in self.live.batches(steps=steps):
            loss = ((self.model(x + random.random()) - y) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            self.live.record(loss=loss, grad_norm=float(self.live.progress.step))
            self.live.advance(samples=len(x))
            if self.live.progress.step == dies_after:
                return
            manager.step(self.live)


def died(manager):
    """What a death leaves: no last line, nothing more that is put, and a lock that is free."""
    flight = manager._saves._flight
    logging.getLogger("trainfold").removeFilter(flight.journal)
    WARNED.remove(flight.journal.warned)
    if flight.journal._at_exit is not None:
        flight.journal._at_exit.cancel()
    for parts in (getattr(flight._file, "_parts", None), getattr(flight.journal._file, "_parts", None)):
        if parts is not None and parts._job is not None:
            parts._job.wait()
    manager._lease._held.close()

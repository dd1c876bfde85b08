"""Checks of a manager beside saving: before the first save, at the end of a run that was never saved, and in a rehearsal. May import `live` and what lies below it."""

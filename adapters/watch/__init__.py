"""Finds what a live run's components miss: unsaved state, an open window, swapped weights, unattached optimizers. May import `loaders`, `components`, `own_state` and what lies between."""

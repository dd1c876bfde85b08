"""Weights from outside a run's checkpoints: what a source is asked for, and whether it has supplied all of it. May import every room but `resume` and `save`."""

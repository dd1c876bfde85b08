"""Formats of checkpoints, one room each."""

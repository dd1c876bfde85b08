"""Saves that refer to files of other checkpoints, and checkpoints that are written again so that they stand alone. May import what `runs` may."""

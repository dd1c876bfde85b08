"""Checkpoints of torch and of programs that use it: sources of their weights, what continues their trainings, and what writes them. May import what `weights` may, and `weights`."""

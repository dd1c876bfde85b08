"""Loops that train the same task, each saved by a different tool; see benchmarks/resume.py."""

"""Loops that train the same task, each saved by another tool; see benchmarks/resume.py."""

"""Evaluate a model of a mutable loop without disturbing it. May import `streams`, `components`."""

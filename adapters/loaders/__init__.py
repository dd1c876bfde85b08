"""Loaders of a mutable loop, each with a position that can be saved and sought. May import `draws`, `streams`, `components`."""

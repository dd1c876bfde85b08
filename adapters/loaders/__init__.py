"""The loaders of a mutable loop, each with a position that can be saved and restored. May import `draws`, `streams`, `components`."""

"""A mutable run as one value: attach, count, capture, restore. May import `loaders` and `components`."""

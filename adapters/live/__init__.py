"""A mutable run as one value: attach, count, capture, restore. May import `script`, `watch`, `loaders` and what lies below them."""

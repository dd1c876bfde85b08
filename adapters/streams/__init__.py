"""Random streams and generators of a mutable loop. May import `components`."""

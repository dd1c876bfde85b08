"""The only mutable objects of core: the working objects of one step in flight. Only `step` may import it."""

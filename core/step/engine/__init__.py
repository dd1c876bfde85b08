"""The only mutable objects of core: those that one step in flight computes with. Only `step` may import it."""

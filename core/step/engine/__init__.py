"""The only mutable objects of core: what one step in flight computes with. Only `step` imports it."""

"""Tensors and objects of which each rank has its own part: DTensors as `Shard` leaves, and what is refused. May import `core`; every other room of adapters may import it."""

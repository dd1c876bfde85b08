"""Models that are built on the meta device, and get memory, values of a checkpoint, and values of their own code for the rest. May import `core`, `backends` and `sharded`."""

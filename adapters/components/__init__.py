"""The mutable object behind each component of a state: modules, optimizers, schedulers. May import `own_state`."""

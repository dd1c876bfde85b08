"""One mutable object behind one component of a state: modules, optimizers, schedulers. May import `own_state`."""

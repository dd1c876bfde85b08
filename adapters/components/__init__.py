"""One mutable object behind one component of a state: modules, optimizers, schedulers, random streams. May import core, backends."""

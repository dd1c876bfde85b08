"""The commands that copy checkpoints from one store into another, and put them together from folders of several nodes. May import locate, terminal and the backends."""

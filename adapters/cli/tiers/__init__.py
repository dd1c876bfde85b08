"""The command that copies checkpoints from one store into another. May import locate, terminal and the backends."""

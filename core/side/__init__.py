"""Files that belong to a checkpoint: which of a manifest's tensors they are, and their names. May import format, state and the ground."""

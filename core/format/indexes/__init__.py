"""The indexes of a checkpoint's ranks: where each rank's bytes are. May import the rest of `format`."""

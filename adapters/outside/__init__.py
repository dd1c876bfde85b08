"""Weights of an attached model that come from outside its checkpoints. May import `components` and below, not `live`."""

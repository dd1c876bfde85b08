"""`trainfold replay` and `trainfold bisect`: ask a run again what it did. May import the commands that show checkpoints, and what is below them."""

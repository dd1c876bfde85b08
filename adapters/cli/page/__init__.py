"""`trainfold page`: one file that shows a run, or a live page on this machine. May import the commands that show checkpoints, and what is below them."""

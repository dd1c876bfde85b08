"""Pipelines: a list of stages as one model, and the norm over them. May import `sharded` and the modules of `parallel` below."""

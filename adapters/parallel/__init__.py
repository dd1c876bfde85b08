"""Parallel training as a manager sees it: what wrappers such as DistributedDataParallel keep equal. May import `live` and everything below it."""

"""Parallel training as the manager sees it: what wrappers such as DistributedDataParallel keep alike. May import `live` and what lies below it."""

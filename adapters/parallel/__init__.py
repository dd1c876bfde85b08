"""Parallel training as the manager sees it: what wrappers such as DistributedDataParallel keep alike. May import live, components, backends and core."""

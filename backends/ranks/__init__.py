"""Ranks, as threads or processes, and how they communicate. May import the ground floor of `backends`, and not `stores`."""

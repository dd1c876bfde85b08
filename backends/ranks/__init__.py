"""Ranks: threads, processes, and what they tell one another. May import the ground floor of `backends`, and nothing of `stores`."""

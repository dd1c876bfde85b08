"""Buckets of tests: servers of the three providers on the loopback, a network that fails, and runs in them."""

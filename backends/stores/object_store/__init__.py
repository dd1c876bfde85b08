"""Runs in object stores: requests over obstore or a filesystem of fsspec, the lease that serves as a run's lock, and the `Store` made of both. May import the ground of stores."""

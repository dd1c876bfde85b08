"""Runs in object stores through a filesystem of fsspec: the calls of obstore that a `Bucket` makes, and what each library needs for conditions. May import the ground of stores."""

"""What a live run checks beyond its components. May import `loaders`, `components`, `own_state` and what lies between."""

"""What a live run notices beside its components. May import `loaders`, `components`, `own_state` and what lies between."""

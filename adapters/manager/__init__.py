"""The checkpoint manager that a loop calls: decides when a run is saved, resumed and pruned, and does it. May import `guards`, `parallel`, `live`, `requests` and what lies below them."""

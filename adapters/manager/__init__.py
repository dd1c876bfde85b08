"""When a run is saved, resumed and pruned, and the manager that a loop calls. May import `guards`, `parallel`, `live`, `requests` and what lies below them."""

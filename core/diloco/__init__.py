"""DiLoCo: rounds in which many workers train apart and an outer optimizer puts their weights together, as values. Imports `step` and everything below it."""

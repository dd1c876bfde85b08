"""A training run as a value: components, leaves, names, specs and the contract. May import `data`, `layout` and the ground floor."""

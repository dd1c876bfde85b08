"""A training run as a value: components, leaves, names, specs, the contract. May import `data`, `layout` and the ground floor."""

"""Metrics: commutative monoids of exact integers, one noun a module; `trainfold.metrics` has their names. May import `exact` and the ground floor."""

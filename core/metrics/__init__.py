"""Metrics: commutative monoids of exact integers, one noun a module; `trainfold.metrics` has their names."""

"""The native format as values and bytes, read strictly. May import `evaluate`, `step` and what lies below them."""

"""What to load, or every reason not to: decisions as values. May import `history`, `format` and what lies below them, and not `save`."""

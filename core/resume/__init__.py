"""What is loaded, or every reason why not: decisions as values. May import `history`, `format` and what lies below them, and not `save`."""

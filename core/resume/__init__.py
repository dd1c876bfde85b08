"""What is loaded, or every reason why not: decisions as values. May import `format` and what lies below it, and nothing of `save`."""

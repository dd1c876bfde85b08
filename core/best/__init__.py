"""Which checkpoint is the best: decisions as values. May import `format` and what lies below it."""

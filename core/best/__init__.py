"""Which checkpoint is the best, decided once. May import `format` and what lies below it."""

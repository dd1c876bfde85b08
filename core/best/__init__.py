"""The decision which checkpoint is the best. May import `format` and what lies below it."""

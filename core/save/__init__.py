"""What to save, when, and which checkpoints to keep: decisions as values. May import `best`, `history`, `format` and what lies below them, and not `resume`."""

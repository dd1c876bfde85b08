"""What is saved, when, and what stays: decisions as values. May import `best`, `history`, `format` and what lies below them, and not `resume`."""

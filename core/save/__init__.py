"""What is saved, when, and what stays: decisions as values. May import `best`, `format` and what lies below them, and nothing of `resume`."""

"""What a run holds and where each checkpoint comes from: inventory, lineage, quarantine. May import `format` and what lies below it."""

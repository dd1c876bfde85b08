"""The checkpoints of a run and their descent: inventory, lineage, quarantine. May import `format` and what lies below it."""

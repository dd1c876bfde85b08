"""The files of flight logs, beside the checkpoints of a run. May import `stores` and the ground floor."""

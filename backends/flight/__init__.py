"""The files of flight logs, beside the checkpoints of a run, and the records of rehearsals and replays. May import `stores` and the ground floor."""

"""Effects: where bytes, ranks and time are. Interpreters of plans, and storage formats."""

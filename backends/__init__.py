"""Effects: storage, ranks and time. Interpreters of plans, and storage formats."""

"""What the store does to its disk in saves, re-saves, rewinds and deletions, and what must hold after a crash at each point."""

"""A disk as a value: every change that a program makes to it is recorded, and every state that a crash may leave is derived."""

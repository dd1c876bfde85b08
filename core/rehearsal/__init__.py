"""The orders that a rehearsal gives a program, and its conclusions from the program's records. May import `layout` and the ground floor."""

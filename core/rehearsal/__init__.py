"""What a rehearsal asks of a program, and what it concludes from the program's records. May import `layout` and the ground floor."""

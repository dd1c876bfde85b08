"""What a rehearsal asks of a program and what it concludes from the program's records. Pure: imports core alone."""

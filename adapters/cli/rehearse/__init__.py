"""`trainfold rehearse`: runs a user's program, kills it, and compares. May import the rest of the command line's parts that show results and open runs, and no command."""

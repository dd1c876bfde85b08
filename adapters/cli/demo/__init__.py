"""`trainfold demo`: a run that is killed again and again, and ends with the bits of one that was not. May import the command line and all below it."""

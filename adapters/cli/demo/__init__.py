"""`trainfold demo`: a run that is killed several times and ends with the bits of an uninterrupted one. May import the command line and all below it."""

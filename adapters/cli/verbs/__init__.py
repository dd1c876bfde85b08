"""The verbs of the command line and their arguments, by what one wants to do. May import what parses arguments and shows results; a verb imports its command when it runs."""

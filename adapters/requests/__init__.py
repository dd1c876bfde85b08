"""Sources of requests to save or to stop: the program, signals, and files in the run. May import core, backends."""

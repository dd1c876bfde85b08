"""Pure functions and frozen values: no files, clocks, ranks, environment or global randomness. Imports nothing of the other three packages."""

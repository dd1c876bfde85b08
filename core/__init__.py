"""Pure functions and frozen values: no files, clocks, ranks, environment or global randomness."""

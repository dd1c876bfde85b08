"""Which part of a tensor each rank holds, and which ranks exist. May import the ground floor."""

"""The flight log: what a run did in each step, as bytes and as values, and where two of them part. May import the ground floor."""

"""Which rank reads bytes that several ranks need, and over which other ranks they come to all of these. Imports the ground floor; no torch."""

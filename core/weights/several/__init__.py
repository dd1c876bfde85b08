"""Several sources of weights as one: which of them has each tensor, and the record of it. May import what `weights` may, and of that room what a single source is."""

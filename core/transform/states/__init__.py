"""A whole state in other pieces: its model, its optimizer and what its contract says of them. May import the other modules of `transform`, and what they may."""

"""Where the parts of a tensor are, and which ranks there are. May import the ground floor."""

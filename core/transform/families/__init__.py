"""Tables of rules for families of models: the names and forms of reference code, and those at a model hub. May import the other modules of `transform`, and what they may."""

"""How ranks that are processes exchange bytes: over a mesh of all, or over a tree. May import the modules of `backends.ranks`, but not `torch_distributed`."""

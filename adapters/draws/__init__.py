"""What the feeds of all loaders have in common: the protocol, how a batch was drawn, and drawing it again. May import `streams`, `components`, `own_state`."""

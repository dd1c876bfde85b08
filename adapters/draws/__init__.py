"""What all feeds share: the protocol, the record of how a batch was drawn, and drawing it again. May import `streams`, `components`, `own_state`."""

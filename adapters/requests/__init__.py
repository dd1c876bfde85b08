"""Where requests to save or to stop come from. May import core, backends."""

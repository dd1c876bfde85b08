"""Objects of other libraries behind trainfold's protocols. May import core, backends."""

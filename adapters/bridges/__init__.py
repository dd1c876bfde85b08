"""Wrappers that give objects of other libraries, such as a torchmetrics metric, trainfold's protocols. May import core, backends."""

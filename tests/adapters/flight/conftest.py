"""What the tests of this room share."""

from kit.adapters.nonfinite_cases import begun

__all__ = ["begun"]

"""How ranks are connected that have to agree, and what that costs. Imports the ground floor; no torch."""

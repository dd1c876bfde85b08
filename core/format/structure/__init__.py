"""The structure of a component as a JSON node: written, walked, checked and rebuilt. May import what `core.format` may import, and its tables of names and dtypes."""

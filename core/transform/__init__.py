"""Pure transforms of ``{name: tensor}``: other names, other cuts, other dtypes, decided on specs before any byte is read. May import the ground floor, `layout`, `state` and `format`."""

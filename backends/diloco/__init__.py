"""The server of DiLoCo and its client: they carry out what `core.diloco` decides, over connections of `peers`. May import `weights` and below."""

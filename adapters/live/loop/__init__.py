"""Tracks where a loop is in its data: its batches, its epochs, and how far it draws ahead of its steps. May import `live.restore`, `loaders`, `batches`, `streams`, `components`, `own_state`."""

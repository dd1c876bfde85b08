"""Where a loop is in its data: its batches, its epochs, how far ahead of its steps it draws. May import `live.restore`, `loaders`, `draws`, `streams`, `components`, `own_state`."""

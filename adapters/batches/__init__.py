"""What batches come from: the `Feed` protocol (in `feed`), the record of how each batch was drawn, and drawing it again.

A feed is a loader with a position that can be saved and restored; the room `loaders` has the implementations. May import `streams`,
`components`, `own_state`.
"""

"""The feeds of a mutable loop: each reads one kind of loader, from a position that can be saved and restored.

They implement the `Feed` protocol of the room `batches`; `choose.feed_of` chooses the feed for a loader. May import `batches`, `streams`,
`components`.
"""

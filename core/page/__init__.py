"""The page that shows a run: its facts as values, and these as HTML. May import every other room of `core`."""

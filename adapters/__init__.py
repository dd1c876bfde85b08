"""Everything that handles a user's mutable torch objects: live runs, managers, loaders, the command line. May import `backends` and `core`."""

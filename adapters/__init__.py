"""Everything that handles mutable torch objects: live runs, managers, loaders, the command line."""

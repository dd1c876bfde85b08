"""The file of a run that names its best checkpoints: it is read, checked and written here. May import the rooms that `runs` may, and `runs` itself."""

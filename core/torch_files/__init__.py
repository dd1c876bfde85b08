"""What torch writes, read as values: pickles of which nothing is run, the metadata of distributed checkpoints, and tensors in files. May import `format`, `layout` and the ground floor."""

"""Files that belong to a checkpoint, such as a tokenizer: read from the user's disk, and put into a directory. May import runs, formats, ranks, stores and the ground."""

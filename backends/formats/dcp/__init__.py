"""Directories of torch's distributed checkpoints: what is in them, parts of tensors read from them, and new ones written. May import `torch_save`."""

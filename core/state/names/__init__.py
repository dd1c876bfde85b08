"""Names of tensors in modules, where wrappers have prefixes. May import torch, and the ground floor."""

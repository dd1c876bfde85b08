"""Files of `torch.save`, and the pieces of such files in other formats: the members of the archive, and parts of tensors read from it. May import `native`'s scatter and the ground floor."""

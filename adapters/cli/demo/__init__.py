"""`trainfold demo`: a training run that is killed again and again, and ends with the bits of one that was not."""

"""Ten thousand checkpoints, changed by an attacker who can compute their digests: the changes, the readers, and what must hold."""

"""Checkpoints changed by somebody who can sign them, by the ten thousand: what reads them, and what must hold."""

"""Crash safety by enumeration: the effects of a program on a disk are recorded, and every disk that a crash may leave is built."""

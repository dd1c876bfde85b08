"""Crash safety, enumerated: what a program does to a disk is recorded, and every disk that a crash may leave is built."""

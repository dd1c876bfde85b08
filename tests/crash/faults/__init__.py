"""System calls that fail: each in turn, by a wrapper, by the kernel, and on a disk that is full."""

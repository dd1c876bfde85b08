"""Laws, contracts and Hypothesis strategies, for this project's tests and for users' own.

May import `core`, and of `backends` what needs no files: the protocol of stores, the store in memory, `runs.api`, and a warning of `runs.load`.
"""

"""Laws, contracts and Hypothesis strategies, for this project's tests and for users' own.

May import `core`, and of `backends` what needs no files: the protocols, the store in memory and the interpreters of plans.
"""

"""Runs on a store: the interpreters of plans. May import every other room of `backends`."""

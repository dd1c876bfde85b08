"""Helpers shared by test files of `backends`."""

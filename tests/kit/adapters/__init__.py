"""Helpers shared by test files of `adapters`."""

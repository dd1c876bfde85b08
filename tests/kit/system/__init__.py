"""Helpers shared by test files of whole programs."""

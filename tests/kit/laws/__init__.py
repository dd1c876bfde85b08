"""Helpers shared by test files of the laws."""

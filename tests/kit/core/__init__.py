"""Shared cases for the test files of `core`."""
